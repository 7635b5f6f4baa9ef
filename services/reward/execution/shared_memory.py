"""Memory that two processes share, for what is too large for a pipe."""

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing.reduction import DupFd
from typing import Any, Final

KEPT_BYTES: Final = 2**25
"""Size up to which memory is kept. The write after a larger content returns what that took."""
_FIRST_BYTES: Final = 2**20


class SharedMemory:
    """A file in memory that one process writes and another reads, which gets it as an argument when it is spawned.

    It is as large as its largest content, not named, and gone with both. `multiprocessing.shared_memory` would lie in
    /dev/shm, for which most containers have 64 MiB.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = _new_file() if descriptor is None else descriptor
        self._map = mmap.mmap(self._descriptor, 0)

    @property
    def num_bytes(self) -> int:
        """Size of the block."""
        return len(self._map)

    def write(self, parts: Sequence[bytes]) -> list[int]:
        """Puts them in the place of what was there; returns where each begins, and the last ends."""
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + len(part))
        if ends[-1] > self.num_bytes or self.num_bytes > max(KEPT_BYTES, ends[-1]):
            os.truncate(self._descriptor, max(_FIRST_BYTES, ends[-1]))
            self._map_again()
        for part, (start, end) in zip(parts, pairwise(ends), strict=True):
            self._map[start:end] = part
        return ends

    def read(self, ends: Sequence[int]) -> list[bytes]:
        """Returns the content; `ends` is what `write` returned."""
        if os.fstat(self._descriptor).st_size != len(self._map):
            self._map_again()
        return [self._map[start:end] for start, end in pairwise(ends)]

    def close(self) -> None:
        """Unmaps the memory in this process."""
        self._map.close()
        os.close(self._descriptor)

    def _map_again(self) -> None:
        last, self._map = self._map, mmap.mmap(self._descriptor, 0)
        last.close()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickles the handle for a process that is being spawned."""
        return _received, (DupFd(self._descriptor),)


def _received(duplicate: Any) -> SharedMemory:
    return SharedMemory(duplicate.detach())


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("samples")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, _FIRST_BYTES)
    return descriptor
