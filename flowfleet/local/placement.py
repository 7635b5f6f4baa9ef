"""Which process of a stack gets which accelerator at its start. Pure.

A rollout takes one, or as many as share its samples; a trainer one a rank. A rollout and a trainer rank on one device
work, but slowly, and NCCL refuses two members of a group there: full weights are published through host memory then, by
Gloo, and adapters as blobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowfleet.local.pools import Pool
from flowfleet.local.stack import StackError


@dataclass(frozen=True)
class Placement:
    pools: tuple[Pool, ...] = ()
    """Pools with their devices; empty: none are assigned."""
    trainer: tuple[str, ...] = ()
    """Devices that jobs' trainers share out; empty: none is assigned."""

    @property
    def rollouts(self) -> tuple[str, ...]:
        """Devices of all rollouts in order."""
        return tuple(device for pool in self.pools for device in pool.devices or ())

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
            return (
                f"{sum(pool.replicas for pool in self.pools)} rollouts share {len(set(self.rollouts))} accelerators: "
                "jobs of trainer.mode = full publish their weights through host memory (Gloo), which is slower than "
                "NCCL; start fewer --replicas"
            )
        return None


NOWHERE = Placement()
"""Placement on a machine without accelerators."""


def place(pools: Sequence[Pool], available: Sequence[str], trainer_devices: tuple[str, ...] | None = None) -> Placement:
    """Assigns devices: pools take the first of the `available` in their order, and trainers the others. Given devices
    are used as given. If none is left for trainers they share all of them; if there are too few for the rollouts,
    rollouts share. Raises StackError for fewer than one rollout needs."""
    named = {device for pool in pools for device in pool.devices or ()} | {*(trainer_devices or ())}
    free = [device for device in available if device not in named] or [*available]
    placed: list[Pool] = []
    for pool in pools:
        left = [device for device in free if device not in Placement(tuple(placed)).rollouts] or free
        placed.append(pool if pool.devices is not None or not left else _on(pool, left))
    trainers = tuple(device for device in available if device not in Placement(tuple(placed)).rollouts)
    return Placement(tuple(placed), trainer_devices or trainers or tuple(available))


def _on(pool: Pool, devices: Sequence[str]) -> Pool:
    each = pool.sequence_parallel_size
    if len(devices) < each:
        raise StackError(
            f"--sequence-parallel-size {each} needs {each} accelerators per rollout; {len(devices)} "
            f"{'is' if len(devices) == 1 else 'are'} left: choose a smaller size, or give trainers fewer "
            "--trainer-devices"
        )
    chosen = tuple(devices[index % len(devices)] for index in range(pool.replicas * each))
    return pool.model_copy(update={"devices": chosen})
