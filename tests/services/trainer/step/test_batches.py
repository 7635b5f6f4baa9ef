"""Which rank trains on what: every sample once, as many forwards on every rank, the rollout's batches kept."""

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.job.spec import JobSpec
from services.trainer.step.batches import Update, plan_passes, plan_step, split
from tests.services.trainer.steps import make_spec


def spec_with(
    *,
    deterministic: bool = True,
    micro: int = 4,
    updates: int = 1,
    group_size: int = 2,
    batch: int = 4,
    prompts: int = 4,
) -> JobSpec:
    return make_spec(
        Path("model"),
        rollout={"prompts_per_step": prompts, "group_size": group_size, "batch_size": batch},
        trainer={"deterministic": deterministic, "micro_batch_size": micro, "updates_per_step": updates},
    )


def rows_by_rank(update: Update) -> list[list[int]]:
    return [[row for batch in rank if not batch.is_padding for row in batch.rows] for rank in update.by_rank]


def real_rows(update: Update) -> list[int]:
    return [row for rank in update.by_rank for batch in rank if not batch.is_padding for row in batch.rows]


@given(
    num_groups=st.integers(1, 5),
    group_size=st.integers(2, 4),
    micro=st.integers(1, 6),
    updates=st.integers(1, 3),
    world_size=st.integers(1, 4),
    deterministic=st.booleans(),
    dropped=st.integers(0, 3),
)
def test_every_sample_once_and_ranks_in_step(
    num_groups: int, group_size: int, micro: int, updates: int, world_size: int, deterministic: bool, dropped: int
) -> None:
    keys = list(product(range(num_groups), range(group_size)))
    keys = keys[: max(1, len(keys) - dropped)][::-1]
    updates = min(updates, num_groups * group_size)
    spec = spec_with(
        deterministic=deterministic, micro=micro, updates=updates, group_size=group_size, batch=4, prompts=num_groups
    )
    made = len(plan_step(list(product(range(num_groups), range(group_size))), spec, step=3, world_size=1))
    told = [warning for warning in spec.warnings if "repeats whole" in warning]
    assert [f"and a step has {made} of" in warning for warning in told] == [True] * (made < updates)
    plan = plan_step(keys, spec, step=3, world_size=world_size)
    assert sorted(row for update in plan for row in real_rows(update)) == list(range(len(keys)))
    for update in plan:
        assert len(real_rows(update)) == update.num_samples
        assert len({len(rank) for rank in update.by_rank}) == 1
        assert all(0 < len(batch.rows) <= micro for rank in update.by_rank for batch in rank)


def test_deterministic_micro_batches_are_the_rollouts_requests() -> None:
    keys = [(group, index) for group in (3, 1, 0, 2) for index in (1, 0)]  # arrival order
    plan = plan_step(keys, spec_with(), step=0, world_size=1)
    batches = [[keys[row] for row in batch.rows] for batch in plan[0].by_rank[0]]
    assert batches == [[(0, 0), (0, 1), (1, 0), (1, 1)], [(2, 0), (2, 1), (3, 0), (3, 1)]]


def test_a_missing_sample_moves_no_other_batch() -> None:
    keys = [(0, 0), (2, 0), (2, 1), (3, 0), (3, 1)]
    plan = plan_step(keys, spec_with(), step=0, world_size=1)
    assert [batch.rows for batch in plan[0].by_rank[0]] == [(0,), (1, 2, 3, 4)]


def test_shares_are_even_without_determinism() -> None:
    keys = list(product(range(5), range(2)))
    plan = plan_step(keys, spec_with(deterministic=False, micro=2, prompts=5), step=0, world_size=3)
    sizes = [sum(len(batch.rows) for batch in rank if not batch.is_padding) for rank in plan[0].by_rank]
    assert sorted(sizes) == [3, 3, 4]


def test_more_updates_mix_groups_by_seed_and_step() -> None:
    keys = list(product(range(4), range(2)))
    spec = spec_with(deterministic=False, updates=2)
    plans = [plan_step(keys, spec, step, world_size=1) for step in (0, 0, 1)]
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]


def test_fewer_samples_than_updates_make_fewer_updates() -> None:
    plan = plan_step([(0, 0)], spec_with(deterministic=False, updates=3), step=0, world_size=2)
    assert [update.num_samples for update in plan] == [1]
    assert [batch.is_padding for rank in plan[0].by_rank for batch in rank].count(False) == 1


@pytest.mark.parametrize(("count", "parts", "lengths"), [(7, 3, [2, 2, 3]), (2, 3, [0, 1, 1]), (0, 1, [0])])
def test_split_is_even(count: int, parts: int, lengths: list[int]) -> None:
    assert [len(part) for part in split(list(range(count)), parts)] == lengths


@given(
    num_groups=st.integers(1, 5),
    pairs_each=st.integers(1, 3),
    micro=st.integers(2, 7),
    updates=st.integers(1, 3),
    world_size=st.integers(1, 4),
    deterministic=st.booleans(),
)
def test_a_pair_stays_together_winner_first(
    num_groups: int, pairs_each: int, micro: int, updates: int, world_size: int, deterministic: bool
) -> None:
    keys = list(product(range(num_groups), range(2 * pairs_each)))
    pairs = [(row + 1, row) for row in range(0, len(keys), 2)]
    spec = make_spec(
        Path("model"),
        algorithm={"name": "online_dpo", "pairs_per_group": pairs_each},
        rollout={"prompts_per_step": num_groups, "group_size": 2 * pairs_each},
        trainer={
            "deterministic": deterministic,
            "micro_batch_size": micro,
            "updates_per_step": min(updates, num_groups * pairs_each),
        },
    )
    plan = plan_step(keys, spec, step=3, world_size=world_size, pairs=pairs[::-1])
    assert sorted(row for update in plan for row in real_rows(update)) == list(range(len(keys)))
    for update in plan:
        assert len({len(rank) for rank in update.by_rank}) == 1
        for batch in (batch for rank in update.by_rank for batch in rank):
            assert 0 < len(batch.rows) <= micro
            assert set(zip(batch.rows[0::2], batch.rows[1::2], strict=True)) <= set(pairs)


@given(
    num_groups=st.integers(1, 5),
    group_size=st.sampled_from([2, 4]),
    micro=st.integers(2, 6),
    updates=st.integers(1, 3),
    world_size=st.integers(1, 4),
    kind=st.sampled_from(["plain", "deterministic", "pairs"]),
)
def test_every_pass_has_each_sample_once_on_its_rank(
    num_groups: int, group_size: int, micro: int, updates: int, world_size: int, kind: str
) -> None:
    """Later passes have as many updates and micro-batches, and keep pairs and the rollout's batches whole."""
    keys = list(product(range(num_groups), range(group_size)))
    pairs = [(row + 1, row) for row in range(0, len(keys), 2)] if kind == "pairs" else []
    algorithm = {"name": "online_dpo", "pairs_per_group": group_size // 2} if pairs else {}
    spec = make_spec(
        Path("model"),
        algorithm=algorithm,
        rollout={"prompts_per_step": num_groups, "group_size": group_size, "batch_size": 4},
        trainer={
            "deterministic": kind == "deterministic",
            "micro_batch_size": micro,
            "updates_per_step": min(updates, num_groups * group_size // 2),
            "passes": 3,
        },
    )
    first, *later = plan_passes(keys, spec, step=3, world_size=world_size, pairs=pairs)
    assert first == plan_step(keys, spec, step=3, world_size=world_size, pairs=pairs)
    assert len(later) == 2
    whole = {batch.rows for update in first for rank in update.by_rank for batch in rank}
    for plan in later:
        assert len(plan) == len(first)
        for rank in range(world_size):
            mine = [sorted(row for update in part for row in rows_by_rank(update)[rank]) for part in (first, plan)]
            assert mine[0] == mine[1]
        for before, update in zip(first, plan, strict=True):
            assert [len(rank) for rank in update.by_rank] == [len(rank) for rank in before.by_rank]
            assert len(real_rows(update)) == update.num_samples
            batches = [batch for rank in update.by_rank for batch in rank]
            assert all(0 < len(batch.rows) <= micro for batch in batches)
            if kind == "deterministic":
                assert {batch.rows for batch in batches} <= whole
            if pairs:
                for batch in batches:
                    assert set(zip(batch.rows[0::2], batch.rows[1::2], strict=True)) <= set(pairs)


def test_passes_mix_updates_by_seed_step_and_pass() -> None:
    keys = list(product(range(4), range(4)))
    spec = make_spec(
        Path("model"),
        rollout={"prompts_per_step": 4, "group_size": 4},
        trainer={"deterministic": False, "updates_per_step": 2, "passes": 3},
    )
    plans = [plan_passes(keys, spec, step, world_size=1) for step in (0, 0, 1)]
    assert plans[0] == plans[1]
    dealt = [tuple(sorted(real_rows(update))) for plan in (plans[0], plans[2]) for part in plan for update in part]
    assert len(set(dealt)) == len(dealt)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    updates=st.integers(1, 3),
    world_size=st.integers(1, 3),
    passes=st.integers(1, 2),
    micro=st.integers(4, 9),
)
def test_losses_that_compare_groups_get_them_whole(
    sizes: list[int], updates: int, world_size: int, passes: int, micro: int
) -> None:
    """Also where samples were dropped; every pass trains on every sample once."""
    spec = make_spec(
        Path("model"),
        algorithm={"name": "dgpo"},
        rollout={"prompts_per_step": 5, "group_size": 4},
        trainer={"updates_per_step": updates, "micro_batch_size": micro, "passes": passes},
    )
    keys = [(group, index) for group, size in enumerate(sizes) for index in range(size)][::-1]
    for plan in plan_passes(keys, spec, step=1, world_size=world_size):
        assert sorted(row for update in plan for row in real_rows(update)) == list(range(len(keys)))
        for update in plan:
            for batch in (batch for rank in update.by_rank for batch in rank):
                assert len(batch.rows) <= micro
                groups = {keys[row][0] for row in batch.rows}
                assert len(batch.rows) == sum(sizes[group] for group in groups)
