"""Plans of packed sequences: every sample once a pass, ranks alike, no row above the limit but a single sequence."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.job.spec import JobSpec, parse_job
from services.trainer.step.packing import pack, plan_packed


def spec_of(limit: int, updates: int, passes: int, deterministic: bool = False) -> JobSpec:
    trainer = {"micro_batch_tokens": limit, "updates_per_step": updates, "passes": passes}
    return parse_job(
        {
            "model": {"path": "m"},
            "data": {"train": "t.txt"},
            "rewards": {"r": {}},
            "algorithm": {"name": "gspo"},
            "trainer": {**trainer, "deterministic": deterministic},
        }
    )


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    limit=st.integers(1, 90),
    updates=st.integers(1, 4),
    passes=st.integers(1, 3),
    world_size=st.integers(1, 4),
)
def test_every_sample_once_a_pass(sizes: list[int], limit: int, updates: int, passes: int, world_size: int) -> None:
    keys = [(row // 4, row % 4) for row in range(len(sizes))]
    plan = plan_packed(keys, sizes, spec_of(limit, updates, passes), 3, world_size)
    assert plan == plan_packed(keys, sizes, spec_of(limit, updates, passes), 3, world_size)
    assert len(plan) == passes
    owners = []
    for planned in plan:
        assert len(planned) == min(updates, len(sizes))
        ranks: list[list[int]] = [[] for _ in range(world_size)]
        for update in planned:
            assert len({len(batches) for batches in update.by_rank}) == 1
            for rank, batches in enumerate(update.by_rank):
                own = [batch.rows for batch in batches if not batch.is_padding]
                assert all(sum(sizes[row] for row in rows) <= limit or len(rows) == 1 for rows in own)
                ranks[rank] += chain(*own)
            trained = sum(len(b.rows) for batches in update.by_rank for b in batches if not b.is_padding)
            assert trained == update.num_samples
        assert sorted(chain(*ranks)) == list(range(len(sizes)))
        owners.append([sorted(rows) for rows in ranks])
    assert all(owner == owners[0] for owner in owners), "a rank keeps its samples in all passes"


@pytest.mark.parametrize(("limit", "packs"), [(10, [(0, 3), (1,), (2, 4)]), (0, [(0,), (1,), (2,), (3,), (4,)])])
def test_the_longest_are_placed_first(limit: int, packs: list[tuple[int, ...]]) -> None:
    assert sorted(pack(range(5), [7, 12, 6, 3, 4], limit)) == packs


def test_deterministic_each_goes_alone() -> None:
    (plan,) = plan_packed([(0, 0), (0, 1)], [3, 4], spec_of(1000, 1, 1, deterministic=True), 0, 1)
    assert [batch.rows for batch in plan[0].by_rank[0]] == [(1,), (0,)]
