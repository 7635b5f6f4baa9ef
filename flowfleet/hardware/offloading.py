"""Activations that wait in pinned host memory between a forward and its backward.

What autograd saves goes out on a stream of its own, and comes back the last first, a block before its use. Weights
stay, as do tensors below 1 MiB and those with gaps. Bits do not change.

CUDA graphs (graphs.py) may capture a forward and its backward: a launched call of the same kind comes first, and leaves
the host buffers. Replays use the first ones, so launched calls take others meanwhile (`is_replaying`), and nothing may
be replayed until the backward of launched ones (`is_empty`).
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from flowfleet.hardware import devices

LEAST_BYTES: Final = 2**20
LEAVING: Final = 2
"""Tensors that may be on their way out before the forward waits."""


AHEAD: Final = 2
"""Tensors that come back before they are asked for: a block of two streams saves two."""


class _Away:
    """A tensor in host memory."""

    def __init__(self, host: Tensor, number: int) -> None:
        self.host, self.number = host, number
        self.uses = 1
        """How often it was saved and is yet to be asked for."""
        self.back: Tensor | None = None
        self.arrived: Any = None


class Offload:
    """Takes the place of a module's `forward`."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.is_replaying: Callable[[], bool] = lambda: False
        """Returns True between the replays of a forward and of its backward."""
        self._module, self._plain, self._device = module, module.forward, device
        self._stream = torch.Stream(device=device)
        self._buffers: list[Tensor] = []
        """On the host, by number."""
        self._outgrown: list[Tensor] = []
        """Buffers that graphs may still use."""
        self._away: WeakValueDictionary[int, _Away] = WeakValueDictionary()
        """Numbers are the order of saving."""
        self._next, self._num_captured = 0, 0
        self._seen: dict[Any, tuple[StorageWeakRef, _Away]] = {}
        """Tensors that the forward at work saved."""
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        self._weights: set[int] = set()
        """Their storages."""
        module.forward = self

    @property
    def is_empty(self) -> bool:
        """True unless launched forwards await their backward."""
        return not self._away

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        with self._saving():
            return self._plain(*args, **kwargs)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        held = (*self._module.parameters(), *self._module.buffers())
        self._weights = {tensor.untyped_storage().data_ptr() for tensor in held}
        self._next = max(self._away, default=-1) + 1
        if self.is_replaying():
            self._next = max(self._next, self._num_captured)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._seen.clear()
        while self._leaving:
            self._wait()
        if torch.cuda.is_current_stream_capturing():
            self._num_captured = max(self._num_captured, self._next)

    def _pack(self, tensor: Tensor) -> Tensor | _Away:
        storage = tensor.untyped_storage()
        is_large = tensor.nbytes >= LEAST_BYTES and tensor.device == self._device and tensor.is_contiguous()
        if not is_large or storage.data_ptr() in self._weights:
            return tensor
        key = tensor.data_ptr(), tensor.shape, tensor.dtype
        if key in self._seen and not self._seen[key][0].expired():  # type: ignore[no-untyped-call]
            away = self._seen[key][1]
            away.uses += 1
            return away
        away = _Away(self._buffer(tensor), self._next)
        self._next += 1
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            away.host.copy_(tensor.detach(), non_blocking=True)
        self._leaving.append((self._stream.record_event(), tensor.detach()))
        if len(self._leaving) > LEAVING:
            self._wait()
        self._away[away.number] = away
        self._seen[key] = StorageWeakRef(storage), away  # type: ignore[no-untyped-call]
        return away

    def _wait(self) -> None:
        """Frees the first that leaves, once it has left."""
        event, _ = self._leaving.popleft()
        torch.accelerator.current_stream(self._device).wait_event(event)

    def _unpack(self, saved: Tensor | _Away) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._bring(saved)
        for number in range(saved.number - 1, saved.number - 1 - AHEAD, -1):
            if (before := self._away.get(number)) is not None and before.uses:
                self._bring(before)
        torch.accelerator.current_stream(self._device).wait_event(saved.arrived)
        back = saved.back
        assert back is not None
        saved.uses -= 1
        if saved.uses < 1:
            saved.back = None
        return back

    def _bring(self, away: _Away) -> None:
        if away.back is None:
            away.back = torch.empty_like(away.host, device=self._device)
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            with self._stream:
                away.back.copy_(away.host, non_blocking=True)
            away.arrived = self._stream.record_event()

    def _buffer(self, tensor: Tensor) -> Tensor:
        """Room for a tensor, on the next buffer."""
        while len(self._buffers) <= self._next:
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if self._buffers[self._next].nbytes < tensor.nbytes:
            self._outgrown.append(self._buffers[self._next])
            self._buffers[self._next] = devices.byte_buffer(tensor.nbytes, torch.device("cpu"))
        return self._buffers[self._next][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
