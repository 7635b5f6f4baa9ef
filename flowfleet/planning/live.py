"""The most memory that tensors hold at once, counted as operations make them: works on the meta device too."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, counts the storages that operations make until they are freed. What was there before does not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in given:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        """A storage has one Python object for as long as it lives."""
        if id(storage) in self._known:
            return
        self._known.add(id(storage))
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, id(storage), storage.nbytes())

    def _free(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.now -= size
