"""Prompt files that users sent, in the controllers' shared state directory: `uploads/SHA256/NAME`.

A file is written under another name, checked against its digest, and renamed, so what has its name is whole. Other
users cannot open it, and nothing changes it. It goes with the last job that names it, a day after it was last sent or
submitted.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from flowfleet.errors import Full, InvalidRequest, TooLarge

FOLDER: Final = "uploads"
GRACE_S: Final = 24 * 3600.0
"""Time that an upload stays without a job."""
SWEEP_EVERY_S: Final = 3600.0
AT_ONCE: Final = 4
"""Uploads that are written at once; others wait."""
OF_A_CALLER: Final = 2
"""Uploads of one caller among these."""
_PIECE: Final = 1 << 20
_PRIVATE: Final = 0o700
_OWN: Final = 0o600
_READ_ONLY: Final = 0o400
_PART: Final = "part-"


class Uploads:
    """`file_bytes` and `all_bytes` limit one upload and all of them."""

    def __init__(self, state_dir: Path, file_bytes: int, all_bytes: int) -> None:
        self._folder = state_dir.resolve() / FOLDER
        self._file_bytes, self._all_bytes = file_bytes, all_bytes
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._own_slots: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(OF_A_CALLER))

    def check(self, digest: str, name: str, size_bytes: int) -> None:
        """Raises TooLarge for a file of this size, Full where the uploads have no room for it next to the others."""
        self._check_size(size_bytes)
        if self._total(self._folder / digest / name) + size_bytes > self._all_bytes:
            raise Full(
                f"this controller keeps at most {self._all_bytes} bytes of uploads: delete jobs that are "
                "not needed, or have the operator raise --limit uploads_bytes"
            )

    async def put(self, digest: str, name: str, body: AsyncIterator[bytes], caller: str = "") -> int:
        """Stores a file and returns its size. `caller`: name of the key that sends it, of which others wait for each
        other. Raises TooLarge, Full, and InvalidRequest for another content than the digest's."""
        async with self._own_slots[caller], self._slots:
            part = self._folder / f"{_PART}{uuid.uuid4().hex}"
            try:
                self._folder.mkdir(_PRIVATE, parents=True, exist_ok=True)
                size = await self._write(part, digest, body)
                await asyncio.to_thread(self.check, digest, name, size)
                await asyncio.to_thread(self._keep, part, self._folder / digest, name)
            except OSError as error:
                raise Full(f"the controller could not write the upload: {error}") from error
            finally:
                part.unlink(missing_ok=True)
        return size

    def expired(self) -> list[str]:
        """Digests and parts of uploads that were neither sent nor submitted for a day."""
        return [entry.name for entry in self._entries() if time.time() - entry.stat().st_mtime > GRACE_S]

    def sweep(self, named: Collection[str]) -> list[str]:
        """Removes expired uploads that no job names, and returns their names."""
        gone = [name for name in self.expired() if name not in named]
        for name in gone:
            path = self._folder / name
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return gone

    async def _write(self, part: Path, digest: str, body: AsyncIterator[bytes]) -> int:
        found, size = hashlib.sha256(), 0
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _OWN), "wb") as file:
            async for data in _pieces(body):
                size += len(data)
                self._check_size(size)
                found.update(data)
                await asyncio.to_thread(file.write, data)
            await asyncio.to_thread(_sync, file)
            os.fchmod(file.fileno(), _READ_ONLY)
        if found.hexdigest() != digest:
            raise InvalidRequest(f"the body's SHA-256 is {found.hexdigest()}, not the path's: send the file again")
        return size

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._file_bytes:
            raise TooLarge(
                f"an upload has at most {self._file_bytes} bytes: split the file, put it into a store that "
                "the controller reads, or have the operator raise --limit upload_bytes"
            )

    def _keep(self, part: Path, folder: Path, name: str) -> None:
        folder.mkdir(_PRIVATE, exist_ok=True)
        os.replace(part, folder / name)
        os.utime(folder)

    def _total(self, replaced: Path) -> int:
        """Bytes of whole uploads but one; parts are bounded by their number."""
        folders = [Path(entry) for entry in self._entries() if entry.is_dir()]
        return sum(path.stat().st_size for folder in folders for path in folder.iterdir() if path != replaced)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            yield from entries


async def _pieces(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The body in pieces of a size that is worth a thread."""
    piece = bytearray()
    async for data in body:
        piece += data
        if len(piece) >= _PIECE:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
