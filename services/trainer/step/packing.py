"""Which rank trains on which sequences in which forward: pure, the same on every rank.

As batches.py plans for flows, but a micro-batch holds sequences of at most `trainer.micro_batch_tokens` together, which
go forward as one row without padding. A rank keeps its sequences in all passes. Deterministic, each goes alone, as the
transformers engine computes its log-probs.
"""

import random
from collections.abc import Sequence
from itertools import chain

from flowfleet.job.spec import JobSpec
from flowfleet.seeds import derive_seed
from services.trainer.step.batches import Key, MicroBatch, Update, split


def plan_packed(
    keys: Sequence[Key], sizes: Sequence[int], spec: JobSpec, step: int, world_size: int
) -> tuple[tuple[Update, ...], ...]:
    """The updates of each of `trainer.passes`.

    Args:
        keys: of the step's samples, in any order.
        sizes: tokens that each sends through the model.
        spec: the job.
        step: number of the training step.
        world_size: ranks.
    """
    part = spec.trainer
    order = sorted(range(len(keys)), key=lambda row: keys[row])
    if part.updates_per_step > 1:
        random.Random(derive_seed(spec.seed, "updates", step)).shuffle(order)
    shares = [_dealt(share, sizes, world_size) for share in split(order, min(part.updates_per_step, len(order)))]
    by_rank = [[share[rank] for share in shares] for rank in range(world_size)]
    limit = 0 if part.deterministic else part.micro_batch_tokens
    passes = [by_rank]
    for number in range(1, part.passes):
        path = (step, number)
        passes.append([_redealt(updates, spec, (*path, rank)) for rank, updates in enumerate(by_rank)])
    return tuple(
        tuple(_update(rows_of_ranks, sizes, limit) for rows_of_ranks in zip(*ranks, strict=True)) for ranks in passes
    )


def pack(rows: Sequence[int], sizes: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """Micro-batches of at most `limit` tokens, the longest sequences placed first, each where it first fits; a longer
    one is alone. Rows ascend in each."""
    packs: list[list[int]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda row: (-sizes[row], row)):
        number = next((number for number, left in enumerate(room) if sizes[row] <= left), len(packs))
        if number == len(packs):
            packs.append([])
            room.append(limit)
        packs[number].append(row)
        room[number] -= sizes[row]
    return [tuple(sorted(pack_rows)) for pack_rows in packs]


def _dealt(rows: Sequence[int], sizes: Sequence[int], world_size: int) -> list[list[int]]:
    """Shares of the ranks, alike in number and about alike in tokens: dealt by size, there and back."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    for order, row in enumerate(sorted(rows, key=lambda row: (-sizes[row], row))):
        turn, rank = divmod(order, world_size)
        shares[rank if turn % 2 == 0 else world_size - 1 - rank].append(row)
    return shares


def _redealt(updates: Sequence[Sequence[int]], spec: JobSpec, path: tuple[int, ...]) -> list[list[int]]:
    """Draws a rank's sequences again, as many for each update. `path`: step, pass and rank."""
    pool = list(chain(*updates))
    random.Random(derive_seed(spec.seed, "passes", *path)).shuffle(pool)
    dealt = []
    for update in updates:
        dealt.append(pool[: len(update)])
        pool = pool[len(update) :]
    return dealt


def _update(rows_of_ranks: Sequence[Sequence[int]], sizes: Sequence[int], limit: int) -> Update:
    """The same number of micro-batches for each rank: the shortest sequence of the update stands in for those that a
    rank lacks."""
    packs = [pack(rows, sizes, limit) for rows in rows_of_ranks]
    spare = min(chain(*rows_of_ranks), key=lambda row: (sizes[row], row))
    most = max(map(len, packs))
    padded = tuple(
        (*map(MicroBatch, share), *[MicroBatch((spare,), is_padding=True)] * (most - len(share))) for share in packs
    )
    return Update(sum(map(len, rows_of_ranks)), padded)
