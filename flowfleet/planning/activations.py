"""Activations that the forward of a micro-batch keeps for its backward, counted by running the model on the meta
device.

Eager: every storage that autograd saves, once (`torch.autograd.graph.saved_tensors_hooks`). Compiled: the storages that
the partitioner of torch.compile keeps of a block. With checkpointing a block keeps its inputs, with the selective kind
the results of matrix products and attention as well, and one block at a time has all of its activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from flowfleet.planning.compiled import compiled_bytes
from flowfleet.planning.live import LiveBytes
from flowfleet.planning.skeleton import MetaRun

PRODUCTS = {"mm": (0, 1), "addmm": (1, 1), "bmm": (0, 2), "_scaled_mm": (0, 1), "_grouped_mm": (0, 1)}
"""Which argument of a matrix product, and which of its dimensions, is the inner one."""
RECOMPUTED_BELOW = 256
"""Selective checkpointing keeps attention, and matrix products of at least this inner dimension."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one forward and backward of `rows` samples; of blocks the sum over all."""

    rows: int
    outside: int
    """Kept outside the blocks."""
    inputs: int
    """Bytes of the blocks' inputs, each tensor once."""
    saved: int
    """Bytes that the blocks keep besides their inputs."""
    costly: int
    """Results of matrix products and attention in the blocks."""
    largest: int
    """Bytes that the largest block keeps besides its inputs."""
    working: int
    """On top of what is kept, while the largest block computes its backward."""

    def peak(self, checkpointing: str, rows: int, passes: int = 1, *, inputs_left: float = 1.0) -> float:
        """The most that is there at once for `rows` samples with so many forwards before the backward. `inputs_left`:
        share of the blocks' inputs that is on the device."""
        kept = {
            "none": self.saved,
            "selective": self.costly + self.largest,
            "full": self.largest,
        }[checkpointing]
        once = self.largest if checkpointing != "none" else 0
        several = passes * (self.outside + self.inputs * inputs_left + kept - once) + once
        return (several + self.working) * rows / self.rows


@dataclass
class _Block:
    saved: int = 0
    inputs: int = 0
    costly: int = 0
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def measure(
    run: Callable[[], object], expert: nn.Module, stands_for: Mapping[nn.Module, int], rows: int, *, compiled: bool
) -> Activations:
    """Measures a `run` of `rows` samples, with gradient, through a shortened expert on the meta device."""
    recorder = _Recorder(expert, stands_for)
    recorder.run(run)
    blocks = recorder.blocks
    largest = max(blocks, key=lambda block: blocks[block].saved)
    eager, extra = blocks[largest].saved, _working(largest, blocks[largest])
    factor = 1.0
    if compiled:
        exact = compiled_bytes(largest, blocks[largest].args, blocks[largest].kwargs)
        factor = exact / max(1, eager - blocks[largest].inputs)
    saved = {block: max(0, record.saved - record.inputs) * factor for block, record in blocks.items()}
    return Activations(
        rows=rows,
        outside=recorder.outside,
        inputs=sum(record.inputs * stands_for[block] for block, record in blocks.items()),
        saved=int(sum(saved[block] * stands_for[block] for block in blocks)),
        costly=sum(record.costly * stands_for[block] for block, record in blocks.items()),
        largest=int(saved[largest]),
        working=int(extra * min(1.0, factor)),
    )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what each block takes and saves. Storages are kept, so that none is taken for another."""

    def __init__(self, expert: nn.Module, stands_for: Mapping[nn.Module, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks = {block: _Block() for block in stands_for}
        self.outside = 0
        self._current: _Block | None = None
        self._saved = {
            id(parameter.untyped_storage()): parameter.untyped_storage() for parameter in expert.parameters()
        }
        self._inputs: dict[int, Any] = {}

    def run(self, run: Callable[[], object]) -> None:
        handles = []
        for block in self.blocks:
            handles.append(block.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor), MetaRun(), self:
                run()
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._current is not None and _is_costly(func.overloadpacket.__name__, args):
            first = result[0] if isinstance(result, tuple) else result
            self._current.costly += first.numel() * first.itemsize
        return result

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._current = record = self.blocks[block]
        record.args, record.kwargs = args, kwargs
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                record.inputs += _new_bytes(leaf, self._inputs)

    def _leave(self, *_: object) -> None:
        self._current = None

    def _save(self, tensor: Tensor) -> Tensor:
        size = _new_bytes(tensor, self._saved)
        if self._current is None:
            self.outside += size
        else:
            self._current.saved += size
        return tensor


def _is_costly(name: str, args: Any) -> bool:
    if name not in PRODUCTS:
        return name.startswith("_scaled_dot_product")
    argument, dimension = PRODUCTS[name]
    return bool(args[argument].shape[dimension] >= RECOMPUTED_BELOW)


def _new_bytes(tensor: Tensor, known: dict[int, Any]) -> int:
    """Bytes of a tensor's storage, 0 if it was counted before."""
    storage = tensor.untyped_storage()
    if id(storage) in known:
        return 0
    known[id(storage)] = storage
    return int(storage.nbytes())


def _working(block: nn.Module, record: _Block) -> int:
    """Bytes that a block's forward and backward hold at most beyond what it saves."""

    def fresh(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    args, kwargs = tree_map_only(Tensor, fresh, (record.args, record.kwargs))
    with LiveBytes() as live, MetaRun():
        results = [leaf for leaf in tree_leaves(block(*args, **kwargs)) if isinstance(leaf, Tensor)]
        wanted = [result for result in results if result.requires_grad]
        torch.autograd.backward(wanted, [torch.empty_like(result) for result in wanted])
    for parameter in block.parameters():
        parameter.grad = None
    return int(max(0, live.peak - record.saved + record.inputs))
