"""Which rank trains on which samples in which forward: pure, the same on every rank.

A step has updates (one optimizer step each), an update has micro-batches (one forward and backward each), and every
rank runs the same number of them, because each takes part in the collectives of FSDP. Where there are too few, a rank
repeats samples that are trained elsewhere; such a `MicroBatch` is padding and weighs nothing.

Deterministic: a micro-batch is what one Generate call held (whole groups up to `rollout.batch_size` rows, by group
number), cut at `micro_batch_size` rows. With both sizes equal its forward repeats the rollout's bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import ceil
from typing import TypeVar

from flowfleet.jobs import JobSpec
from flowfleet.seeds import derive_seed

T = TypeVar("T")


@dataclass(frozen=True)
class MicroBatch:
    rows: tuple[int, ...]
    """Indices into the step's samples."""
    is_padding: bool = False


@dataclass(frozen=True)
class Update:
    num_samples: int
    """Over all ranks, without padding."""
    by_rank: tuple[tuple[MicroBatch, ...], ...]
    """The same number of micro-batches for every rank."""


Key = tuple[int, int]
"""Group and index of a sample."""


def plan_step(keys: Sequence[Key], spec: JobSpec, step: int, world_size: int) -> tuple[Update, ...]:
    """Splits samples, given by their keys in any order, into `trainer.updates_per_step` updates (fewer if too few)."""
    order = sorted(range(len(keys)), key=lambda row: keys[row])
    if spec.trainer.deterministic:
        parts = _rollout_batches(order, keys, spec)
        parts = _shuffled(parts, spec, step)
        shares = split(parts, min(spec.trainer.updates_per_step, len(parts)))
        return tuple(_dealt(share, world_size) for share in shares)
    rows = _shuffled(order, spec, step)
    return tuple(
        _divided(sorted(share, key=lambda row: keys[row]), spec.trainer.micro_batch_size, world_size)
        for share in split(rows, min(spec.trainer.updates_per_step, len(rows)))
    )


def split(items: Sequence[T], num_parts: int) -> list[list[T]]:
    """Consecutive parts whose lengths differ by one at most; empty ones where there are too few items."""
    bounds = [len(items) * part // num_parts for part in range(num_parts + 1)]
    return [list(items[start:end]) for start, end in pairwise(bounds)]


def _rollout_batches(order: Sequence[int], keys: Sequence[Key], spec: JobSpec) -> list[list[int]]:
    groups_each = max(1, spec.rollout.batch_size // spec.rollout.group_size)
    size = spec.trainer.micro_batch_size
    parts: list[list[int]] = []
    for _, batch in groupby(order, key=lambda row: keys[row][0] // groups_each):
        rows = list(batch)
        parts += [rows[start : start + size] for start in range(0, len(rows), size)]
    return parts


def _shuffled(items: list[T], spec: JobSpec, step: int) -> list[T]:
    """With one update a step the order is of no account and stays."""
    if spec.trainer.updates_per_step == 1:
        return items
    return random.Random(derive_seed(spec.seed, "updates", step)).sample(items, len(items))


def _dealt(parts: Sequence[Sequence[int]], world_size: int) -> Update:
    """Whole micro-batches, dealt to the ranks in turn."""
    num_each = ceil(len(parts) / world_size)
    by_rank = [[MicroBatch(tuple(part)) for part in parts[rank::world_size]] for rank in range(world_size)]
    return Update(sum(map(len, parts)), tuple(_padded(batches, num_each, parts[0]) for batches in by_rank))


def _divided(rows: Sequence[int], size: int, world_size: int) -> Update:
    """Equal shares, each cut into the same number of micro-batches of at most `size` rows."""
    num_each = ceil(ceil(len(rows) / world_size) / size)
    shares = [[MicroBatch(tuple(part)) for part in split(share, num_each) if part] for share in split(rows, world_size)]
    return Update(len(rows), tuple(_padded(batches, num_each, rows[:1]) for batches in shares))


def _padded(batches: list[MicroBatch], length: int, spare: Sequence[int]) -> tuple[MicroBatch, ...]:
    """`spare` stands in where a rank has none of its own."""
    rows = batches[-1].rows if batches else tuple(spare)
    return (*batches, *[MicroBatch(rows, is_padding=True)] * (length - len(batches)))
