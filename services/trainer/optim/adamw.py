"""AdamW on this rank's shards, as the plain tensors that they are.

AdamW and clipping are element-wise but for the gradient's norm, so nothing here needs DTensor, whose dispatch costs a
second at the first step of even a small model. Only checkpoints see the moments as DTensors, so that another number of
ranks can read them. See moments.py for where they are kept.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from flowfleet.hardware import devices
from flowfleet.job.spec import OptimizerPart
from services.trainer.optim.moments import Piece, make_moments
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.sharding import give_grad, grad_of, like, local, num_shards


@dataclass(frozen=True)
class UpdateOutcome:
    """Outcome of one optimizer step."""

    grad_norm: float
    """Before clipping, over all ranks; may be infinite or NaN."""
    applied: bool
    """False when the gradient was not finite: weights and optimizer are as before."""
    lr: float
    loss_scale: float
    """The factor by which the gradients were too large (loss_scale.py)."""


class ShardedAdamW:
    """Optimizes parameters (DTensors, by name), which it updates in place."""

    def __init__(self, trained: Mapping[str, DTensor], part: OptimizerPart, ranks: Ranks) -> None:
        self._trained = trained
        self._part = part
        self._ranks = ranks
        shards = {name: local(parameter) for name, parameter in trained.items()}
        self._moments = make_moments(part.state, shards, ranks.device)
        self._num_steps = {_component(name): 0 for name in trained}

    @torch.no_grad()
    def step(self, lr: float, loss_scale: float = 1.0) -> UpdateOutcome:
        """Collective. Divides the gradients by the loss's scale, clips and applies them, or drops them if they are not
        finite; then frees them."""
        given = {name: grad_of(parameter) for name, parameter in self._trained.items()}
        grads = {name: local(grad) for name, grad in given.items() if grad is not None}
        norm = float(self._norm(list(grads.values()))) / loss_scale
        outcome = UpdateOutcome(norm, math.isfinite(norm), lr, loss_scale)
        if outcome.applied and grads:
            share = min(1.0, self._part.max_grad_norm / (norm + 1e-6)) / loss_scale
            if share != 1:
                torch._foreach_mul_(list(grads.values()), share)
            self._apply(grads, lr)
        for parameter in self._trained.values():
            give_grad(parameter, None)
        return outcome

    def moments(self) -> dict[str, Tensor]:
        """Returns the moments that a checkpoint holds, as DTensors that share the store's memory. Loading a checkpoint
        into these tensors restores the optimizer."""
        return {
            name: like(self._trained[name.partition(".")[2]], tensor)
            for name, tensor in self._moments.tensors().items()
        }

    def num_steps(self) -> dict[str, int]:
        """Updates that were applied, by component: an expert that an update did not use is left alone by it."""
        return dict(self._num_steps)

    def restore(self, num_steps: Mapping[str, int]) -> None:
        """Resumes at `num_steps`; the moments were loaded in place."""
        self._num_steps = {component: num_steps[component] for component in self._num_steps}

    def _apply(self, grads: Mapping[str, Tensor], lr: float) -> None:
        for component in dict.fromkeys(map(_component, grads)):
            of_component = {name: grad for name, grad in grads.items() if _component(name) == component}
            shards = {name: local(self._trained[name]) for name in of_component}
            for pieces in self._moments.pieces(shards, of_component):
                self._update(pieces, self._num_steps[component], lr)
                self._ranks.beats.beat()
            self._num_steps[component] += 1

    def _update(self, pieces: Sequence[Piece], num_steps: int, lr: float) -> None:
        """AdamW's step number `num_steps` + 1 of these."""
        pieces = [piece for piece in pieces if piece.grad.numel()]
        part, device = self._part, self._ranks.device
        adamw(
            [piece.parameter for piece in pieces],
            [piece.grad for piece in pieces],
            [piece.exp_avg for piece in pieces],
            [piece.exp_avg_sq for piece in pieces],
            [],
            list(torch.full((len(pieces),), float(num_steps), device=device).unbind()),
            fused=devices.has_fused_optimizer(device),
            amsgrad=False,
            beta1=part.betas[0],
            beta2=part.betas[1],
            lr=lr,
            weight_decay=part.weight_decay,
            eps=part.eps,
            maximize=False,
        )

    def _norm(self, grads: list[Tensor]) -> Tensor:
        """0-d, over all ranks."""
        norm = get_total_norm(grads, foreach=True)
        shards = max(map(num_shards, self._trained.values()), default=1)
        if shards == 1:
            return norm
        copies = self._ranks.world_size // shards
        return (self._ranks.sum(norm.double().square()) / copies).sqrt().to(norm)


def _component(name: str) -> str:
    return name.partition(".")[0]
