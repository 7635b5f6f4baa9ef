"""Policies besides the trained one: the model before training, the old policy of losses that keep one, the teachers of
a distillation, and the average of the trained weights for jobs that ask for it.

With LoRA the reference is the base without its adapter and costs nothing. With full weights it is a copy of the base in
`model.dtype`, to which the forward casts anyway. A reference that moves (`kl_reference`) is an fp32 copy of the trained
weights. So is the old policy (DiffusionNFT and others): it usually samples, and follows the trained policy after each
step. So is the average (`trainer.ema`), which follows after each update and is validated and exported. All three are
part of every checkpoint. A teacher is an adapter in fp32 that never moves, read from its own files at each start.

Copies hold this rank's shards and lie on its device. To use a policy, its shards are written into the model's own.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flowfleet.algorithms.matching.losses import old_policy_decay
from flowfleet.algorithms.settings import OldPolicySettings
from flowfleet.job.spec import EmaPart, JobSpec
from flowfleet.weights import lora
from services.trainer.parallel.sharding import exchanged, like, local, reshard


@dataclass(frozen=True, slots=True)
class Teacher:
    """A teacher of `algorithm.teachers`."""

    name: str


Policy = Literal["reference", "old"] | Teacher
"""reference: the model before training, or its moved copy. old: the policy that follows the trained one."""


class Policies:
    """Policies of a job besides the trained one; keeps only those that its loss reads. Make it before any training."""

    def __init__(
        self,
        spec: JobSpec,
        experts: lora.Experts,
        trained: Mapping[str, Any],
        model_dtype: torch.dtype,
        teachers: Mapping[str, dict[str, Tensor]] | None = None,
    ) -> None:
        """`teachers`: shards of each teacher's adapter, fp32, by its name."""
        self._spec = spec
        self._experts = experts
        self._trained = trained
        self.num_updates = 0
        """Updates that were applied since the job's start."""
        self._old: dict[str, Tensor] | None = None
        self._average: dict[str, Tensor] | None = None
        self._reference: dict[str, Tensor] | None = None
        self._teachers = dict(teachers or {})
        if spec.loss.keeps_old_policy:
            self._old = self._copies(torch.float32)
        if spec.averages:
            self._average = self._copies(torch.float32)
        if reference_moves(spec):
            self._reference = self._copies(torch.float32)
        elif needs_reference(spec) and spec.trainer.mode == "full":
            self._reference = self._copies(model_dtype)

    @contextmanager
    def active(self, policy: Policy) -> Iterator[None]:
        """Runs the forwards inside under the policy, without gradient only. Afterwards the trained weights are back bit
        for bit, even after an error. Collective where the forwards are."""
        reshard(self._experts)
        with self._switched(policy):
            try:
                yield
            finally:
                reshard(self._experts)

    def updated(self) -> None:
        """An update was applied: the average moves towards the trained weights, where it is its turn."""
        self.num_updates += 1
        part = self._spec.trainer.ema
        if self._average is not None and (self.num_updates + 1) % part.every == 0:
            self._move(self._average, average_decay(part, self.num_updates))

    def follow(self) -> float | None:
        """Moves the old policy towards the trained one after a training step. Returns the share of itself that it kept;
        None without an old policy."""
        if self._old is None:
            return None
        part = self._spec.algorithm.of(OldPolicySettings).old_policy
        decay = old_policy_decay(part, self.num_updates)
        self._move(self._old, decay)
        return decay

    def move_reference(self, step: int, distance: float) -> None:
        """Makes a moving reference the trained policy as it is after training step `step` (from 0), where it is its
        turn. `distance`: the mean of the step's rows to it."""
        part = self._spec.kl.kl_reference
        if self._reference is None or not part.moves:
            return
        is_due = part.every is not None and (step + 1) % part.every == 0
        if is_due or (part.threshold is not None and distance > part.threshold):
            self._move(self._reference, 0.0)

    def weights(self, *, evaluated: bool) -> dict[str, Tensor]:
        """Returns the weights to publish, by name, sharded as the trained weights are.

        The sampling weights are the old policy's if it samples (`old_policy.samples`), else the trained ones. The
        evaluated weights, which are validated and exported, are the average if the job keeps one, else the sampling
        ones.
        """
        sampling = {name: parameter.detach() for name, parameter in self._trained.items()}
        sampling |= self._spread(self._old if self._spec.samples_old_policy else None)
        return sampling | self._spread(self._average) if evaluated else sampling

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that a checkpoint must hold, as DTensors that share the shards' memory: `old.<name>`,
        `ema.<name>`, and `reference.<name>` if the reference moves."""
        moving = self._reference if reference_moves(self._spec) else None
        kept = {"old": self._old, "ema": self._average, "reference": moving}
        return {
            f"{kind}.{name}": tensor for kind, shards in kept.items() for name, tensor in self._spread(shards).items()
        }

    def start_average(self) -> None:
        """The average begins with the trained weights as they are, where a checkpoint holds none."""
        for name, shard in (self._average or {}).items():
            shard.copy_(local(self._trained[name]))

    def _move(self, shards: Mapping[str, Tensor], decay: float) -> None:
        """Moves to decay shards + (1 - decay) trained; a decay of 0 gives the trained weights' bits."""
        for name, shard in shards.items():
            shard.lerp_(local(self._trained[name]), 1 - decay)

    def _switched(self, policy: Policy) -> AbstractContextManager[None]:
        if isinstance(policy, Teacher):
            return exchanged(self._trained, self._teachers[policy.name])
        if policy == "old":
            assert self._old is not None, "the loss keeps no old policy"
            return exchanged(self._trained, self._old)
        if self._reference is not None:
            return exchanged(self._trained, self._reference)
        assert self._spec.trainer.mode == "lora", "the job needs no reference"
        return lora.adapter_disabled(self._experts)

    def _copies(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: local(parameter).to(dtype, copy=True) for name, parameter in self._trained.items()}

    def _spread(self, shards: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        return {name: like(self._trained[name], shard) for name, shard in (shards or {}).items()}


def average_decay(part: EmaPart, num_updates: int) -> float:
    """The share of itself that the average keeps after update `num_updates` (from 1): min(decay, (1 + n) / (10 + n)),
    which warms up, as in the authors' code of Flow-GRPO and DiffusionNFT."""
    assert part.decay is not None, "the job has no average"
    return min(part.decay, (1 + num_updates) / (10 + num_updates))


def reference_moves(spec: JobSpec) -> bool:
    """True if the policy that `kl_coef` holds to follows the trained one, so is not the model before training."""
    return spec.kl.kl_coef > 0 and spec.kl.kl_reference.moves


def needs_reference(spec: JobSpec) -> bool:
    """True if the job's loss compares with the model before training."""
    return spec.loss.needs_reference or spec.kl.kl_coef > 0
