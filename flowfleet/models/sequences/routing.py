"""Which experts a mixture's tokens take: recorded while sampling, taken again while training.

transformers' routers (`…Router`, `…Gate`) give logits, scores and indices of the chosen experts. A hook behind each
notes the indices, or puts others in their place and scores them by the same logits. Only a softmax over all experts is
scored so: each router's own choice is compared at its first use, because another formula would replay wrong weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

_ROUNDING: Final = 0.02
"""Greatest relative difference between a router's scores and ours: a few roundings of bfloat16."""
_BYTE: Final = 256
"""Experts whose numbers fit into a byte."""


class Routing:
    """The routers of a model, in the order of its layers; none of a model without experts."""

    def __init__(self, model: nn.Module | None) -> None:
        modules: list[Any] = [] if model is None else list(model.modules())
        self._routers = [module for module in modules if _is_router(module)]
        names = [] if model is None else [name for name, module in model.named_modules() if module in self._routers]
        self.layers = tuple(int(part) for name in names for part in name.split(".") if part.isdigit())
        """Numbers of the layers that have experts."""
        self._replayed: Tensor | None = None
        """(N, layers, top_k) int64 on the model's device; kept until the next forward, for a block that is computed
        again in the backward."""
        self._records: list[list[Tensor]] | None = None
        self._unchecked = set(range(len(self._routers)))
        for number, router in enumerate(self._routers):
            router.register_forward_hook(self._hook(number))

    @property
    def num_layers(self) -> int:
        """Layers that have experts."""
        return len(self._routers)

    @property
    def top_k(self) -> int:
        """Experts that a token takes; 0 of a model without."""
        return int(getattr(self._routers[0], "top_k", 0)) if self._routers else 0

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 of a model without."""
        return int(getattr(self._routers[0], "num_experts", 0)) if self._routers else 0

    def packed(self, experts: Tensor) -> Tensor:
        """Numbers of experts in the smallest type that fits all of this model's: uint8 or int16."""
        return experts.to(torch.uint8 if self.num_experts <= _BYTE else torch.int16)

    def replay(self, routed: Sequence[Tensor | None], lengths: Sequence[int]) -> None:
        """Sets the experts that the next forward takes: of each sequence (its length, layers, top_k). If no sequence
        has any, the model chooses. Raises ValueError for experts that do not fit the model or the sequences."""
        self._replayed = None
        given = [experts for experts in routed if experts is not None]
        if not given:
            return
        if len(given) < len(lengths):
            raise ValueError("some sequences have routed_experts and some have none: record those of all or of none")
        for experts, length in zip(given, lengths, strict=True):
            self.check(experts, length)
        device = next(self._routers[0].parameters()).device
        self._replayed = torch.cat(given).long().to(device)

    @contextmanager
    def recording(self) -> Iterator[list[list[Tensor]]]:
        """Inside, gives a list for each layer to which each forward adds its experts, (tokens, top_k) int64. A forward
        raises ValueError for a router that is not a softmax over all experts; so does one that replays."""
        self._records = [[] for _ in self._routers]
        try:
            yield self._records
        finally:
            self._records = None

    def check(self, experts: Tensor, length: int) -> None:
        """Raises ValueError for experts that do not fit the model or `length` input tokens."""
        if not self._routers:
            raise ValueError("the trajectory has routed_experts, and this model has no experts")
        expected = (length, len(self._routers), self.top_k)
        if tuple(experts.shape) != expected:
            raise ValueError(f"routed_experts has shape {tuple(experts.shape)}, this model needs {expected}")
        if int(experts.max()) >= self.num_experts:
            raise ValueError(f"routed_experts names expert {int(experts.max())} of {self.num_experts}")

    def _hook(self, number: int) -> Any:
        def hook(router: Any, _: Any, output: Any) -> tuple[Tensor, Tensor, Tensor] | None:
            if self._records is None and self._replayed is None:
                return None
            if number in self._unchecked:
                _check_scores(router, output)
                self._unchecked.discard(number)
            logits, scores, indices = output
            if self._records is not None:
                self._records[number].append(indices.detach())
            if self._replayed is None:
                return None
            chosen = self._replayed[:, number]
            return logits, _scores(router, logits, chosen).to(scores.dtype), chosen

        return hook


def _is_router(module: nn.Module) -> bool:
    """Gates of other kinds choose no experts."""
    name = type(module).__name__.lower()
    return name.endswith("router") or (name.endswith(("gate", "gating")) and hasattr(module, "top_k"))


def _scores(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """(tokens, top_k) float32: the weights of the chosen experts."""
    values = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)
    return values / values.sum(dim=-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else values


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _check_scores(router: Any, output: Any) -> None:
    """Raises ValueError for a router whose output is not ours of its own choice."""
    if isinstance(output, tuple) and len(output) == 3 and output[2].dtype == torch.int64:
        logits, scores, indices = output
        sizes = (getattr(router, "num_experts", 0), getattr(router, "top_k", 0))
        if sizes == (logits.shape[-1], indices.shape[-1]) and scores.shape == indices.shape:
            recomputed = _scores(router, logits, indices)
            if torch.allclose(recomputed, scores.float(), rtol=_ROUNDING, atol=1e-6, equal_nan=True):
                return
    raise ValueError(
        f"{type(router).__name__} does not score its experts by a softmax over all of them, which replay needs: set "
        "rollout.sequence.routed_experts = false"
    )
