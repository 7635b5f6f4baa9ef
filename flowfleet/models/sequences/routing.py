"""Which experts a mixture's tokens take: recorded while sampling, taken again while training.

transformers' routers (`…TopKRouter`) give logits, scores and indices of the chosen experts. A hook behind each notes
the indices, or puts others in their place and scores them by the same logits, as the router would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Routing:
    """The routers of a model, in the order of its layers; none of a model without experts."""

    def __init__(self, model: nn.Module | None) -> None:
        modules: list[Any] = [] if model is None else list(model.modules())
        self._routers = [module for module in modules if type(module).__name__.endswith("TopKRouter")]
        names = [] if model is None else [name for name, module in model.named_modules() if module in self._routers]
        self.layers = tuple(int(part) for name in names for part in name.split(".") if part.isdigit())
        """Numbers of the layers that have experts."""
        self._replayed: Tensor | None = None
        """(N, layers, top_k) int64 on the model's device; kept until the next forward, for a block that is computed
        again in the backward."""
        self._records: list[list[Tensor]] | None = None
        for number, router in enumerate(self._routers):
            router.register_forward_hook(self._hook(number))

    @property
    def num_layers(self) -> int:
        """Layers that have experts."""
        return len(self._routers)

    @property
    def top_k(self) -> int:
        """Experts that a token takes; 0 of a model without."""
        return int(self._routers[0].top_k) if self._routers else 0

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 of a model without."""
        return int(self._routers[0].num_experts) if self._routers else 0

    def replay(self, routed: Sequence[Tensor | None], lengths: Sequence[int]) -> None:
        """What the next forward takes: of each sequence (its length, layers, top_k), or of none at all, then the model
        chooses. Raises ValueError for experts that do not fit the model or the sequences."""
        self._replayed = None
        given = [experts for experts in routed if experts is not None]
        if not given:
            return
        if len(given) < len(lengths):
            raise ValueError("some sequences have routed_experts and some have none: record those of all or of none")
        for experts, length in zip(given, lengths, strict=True):
            self.check(experts, length)
        device = self._routers[0].weight.device
        self._replayed = torch.cat(given).long().to(device)

    @contextmanager
    def recording(self) -> Iterator[list[list[Tensor]]]:
        """Inside, gives a list for each layer to which each forward adds its experts, (tokens, top_k) int64."""
        self._records = [[] for _ in self._routers]
        try:
            yield self._records
        finally:
            self._records = None

    def check(self, experts: Tensor, length: int) -> None:
        """Raises ValueError for experts that do not fit the model or `length` input tokens."""
        if not self._routers:
            raise ValueError("the trajectory has routed_experts, and this model has no experts")
        router = self._routers[0]
        expected = (length, len(self._routers), router.top_k)
        if tuple(experts.shape) != expected:
            raise ValueError(f"routed_experts has shape {tuple(experts.shape)}, this model needs {expected}")
        if int(experts.max()) >= router.num_experts:
            raise ValueError(f"routed_experts names expert {int(experts.max())} of {router.num_experts}")

    def _hook(self, number: int) -> Any:
        def hook(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
            logits, scores, indices = output
            if self._records is not None:
                self._records[number].append(indices.detach())
            if self._replayed is None:
                return None
            chosen = self._replayed[:, number]
            values = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)
            if getattr(router, "norm_topk_prob", True):
                values = values / values.sum(dim=-1, keepdim=True)
            return logits, values.to(scores.dtype), chosen

        return hook
