"""Which ranks hold copies of the weights, which share them, and which share samples. Pure.

Rank r is number r mod S of the S ranks that share its samples (`trainer.mesh.sequence`), which come after one another.
The ranks of one copy of sharded weights come after one another too, and are whole such groups:

    copies    world_size / replicate consecutive ranks each; each rank has its rows of every weight
    samples   S consecutive ranks each; all have the same samples, and each a share of their tokens
"""

import os
from dataclasses import dataclass

from flowfleet.job.spec import JobSpec

STATE_BYTES = 16
"""Bytes of an element that is trained in full: fp32 master, gradient and two moments."""
MOST_OF_DEVICE = 0.5
"""Share of a device's memory that state may take where each host has a copy; the rest is for activations."""


@dataclass(frozen=True)
class Mesh:
    world_size: int = 1
    replicate: int = 1
    sequence: int = 1

    @property
    def num_shards(self) -> int:
        """Ranks that hold a copy of sharded weights together."""
        return self.world_size // self.replicate

    @property
    def num_parts(self) -> int:
        """Parts that a step's samples are dealt to."""
        return self.world_size // self.sequence

    def part(self, rank: int) -> int:
        """The part of the samples that a rank trains on."""
        return rank // self.sequence

    def counts(self, rank: int) -> bool:
        """True for the rank whose sums stand for all those that share its samples."""
        return rank % self.sequence == 0


def arrange(spec: JobSpec, world_size: int, num_elements: int, device_bytes: float | None) -> Mesh:
    """The mesh of a job's ranks.

    Args:
        spec: of the job.
        world_size: ranks, of which torchrun's LOCAL_WORLD_SIZE are on each host.
        num_elements: of all weights.
        device_bytes: memory of each rank's device; None where it is not known, as on CPUs.

    Raises ValueError where the world cannot be divided so.
    """
    part = spec.trainer.mesh
    replicate = part.replicate
    if replicate is None:
        on_host = _on_host(world_size)
        has_room = device_bytes is None or num_elements * STATE_BYTES <= MOST_OF_DEVICE * device_bytes * on_host
        hosts = world_size // on_host if world_size % on_host == 0 and on_host % part.degree == 0 else 1
        replicate = hosts if has_room else 1
    if world_size % (replicate * part.degree):
        raise ValueError(
            f"trainer.mesh divides {world_size} ranks into {replicate} copies of samples shared by {part.degree} "
            "ranks each: choose numbers whose product divides trainer.world_size"
        )
    return Mesh(world_size, replicate, part.degree)


def degrees(spec: JobSpec, world_size: int) -> list[int]:
    """Numbers of a host's ranks by which `trainer.mesh.sequence` may divide the world."""
    on_host, replicate = _on_host(world_size), spec.trainer.mesh.replicate or 1
    return [count for count in range(1, on_host + 1) if on_host % count == 0 == world_size % (count * replicate)]


def _on_host(world_size: int) -> int:
    """Ranks that torchrun has on each host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
