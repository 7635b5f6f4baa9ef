"""Which process of a stack gets which accelerator. Pure.

A rollout takes one, or as many as share its samples; a trainer one a rank. A rollout and a trainer rank on one device
work, but slowly, and NCCL refuses two members of a group there: full weights are published through host memory then, by
Gloo, and adapters as blobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowfleet.local.stack import StackError


@dataclass(frozen=True)
class Placement:
    rollouts: tuple[str, ...] = ()
    """Devices of the rollouts in order, `each` of them a rollout; empty: none is assigned."""
    trainer: tuple[str, ...] = ()
    """Devices of a job's trainer, the first `trainer.world_size` of them; empty: none is assigned."""
    each: int = 1
    """Devices of a rollout."""

    def of_rollout(self, index: int) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.rollouts[index * self.each : (index + 1) * self.each]))

    @property
    def warning(self) -> str | None:
        """Warning for the user about this placement; None where there is nothing to say."""
        if shared := [device for device in self.trainer if device in self.rollouts]:
            return (
                f"rollouts and trainers share accelerator {', '.join(shared)}: each has the memory that the other "
                "leaves, and jobs of trainer.mode = full publish their weights through host memory (Gloo), which is "
                "slower than NCCL; start fewer --replicas, or give --rollout-devices and --trainer-devices"
            )
        if len(set(self.rollouts)) < len(self.rollouts):
            num_rollouts = len(self.rollouts) // self.each
            return (
                f"{num_rollouts} rollouts share {len(set(self.rollouts))} accelerators: jobs of trainer.mode = "
                "full publish their weights through host memory (Gloo), which is slower than NCCL; start fewer "
                "--replicas"
            )
        return None


NOWHERE = Placement()
"""Placement on a machine without accelerators."""


def place(
    replicas: int,
    available: Sequence[str],
    rollout_devices: tuple[str, ...] | None = None,
    trainer_devices: tuple[str, ...] | None = None,
    each: int = 1,
) -> Placement:
    """Assigns devices: rollouts take the first of the `available`, `each` per rollout, and trainers the others. Given
    devices are used as given. If none is left for trainers they share all of them; if there are too few for the
    rollouts, rollouts share. Raises StackError for fewer than one rollout needs."""
    if rollout_devices is None:
        free = [device for device in available if device not in (trainer_devices or ())] or [*available]
        if replicas and 0 < len(free) < each:
            raise StackError(
                f"--sequence-parallel-size {each} needs {each} accelerators per rollout; {len(free)} "
                f"{'is' if len(free) == 1 else 'are'} left: choose a smaller size, or give trainers fewer "
                "--trainer-devices"
            )
        rollout_devices = tuple(free[index % len(free)] for index in range(replicas * each)) if free else ()
    if trainer_devices is None:
        trainer_devices = tuple(device for device in available if device not in rollout_devices) or tuple(available)
    return Placement(rollout_devices, trainer_devices, each)
