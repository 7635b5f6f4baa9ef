"""Whose batch comes next, without an engine: simulated time."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from services.rollout.engines.turns import MAX_JOBS, Share, Turns, Waiting

SECONDS = 2.0
"""Duration of a batch with a cost of 1."""


@dataclass
class Simulated:
    """Replicas with a `Turns` each. A job keeps some batches at each replica, until it has had `left`."""

    shares: Mapping[str, Share]
    left: dict[str, int]
    replicas: int = 1
    lookahead: int = 2

    def run(self, until: float) -> dict[str, float]:
        """Seconds that each job has had, of all replicas; stops at a time or when a job ends."""
        had: defaultdict[str, float] = defaultdict(float)
        self.ended: dict[str, float] = {}
        turns = [Turns[str]() for _ in range(self.replicas)]
        now = [0.0] * self.replicas
        for name in self.shares:
            for one in turns:
                for _ in range(self.lookahead):
                    self._ask(one, name)
        while (place := min(range(self.replicas), key=lambda n: now[n] if turns[n] else float("inf"))) is not None:
            if now[place] >= until or not turns[place]:
                return dict(had)
            taken = turns[place].next(1)
            now[place] += SECONDS
            turns[place].ran(taken, SECONDS)
            had[taken[0].work] += SECONDS
            self.ended[taken[0].work] = now[place]
            self._ask(turns[place], taken[0].work)
        return dict(had)

    def _ask(self, turns: Turns[str], name: str) -> None:
        if self.left[name]:
            self.left[name] -= 1
            turns.add(Waiting(self.shares[name], name, 1, 1.0))


def shares(*owners: str, weights: tuple[float, ...] = ()) -> dict[str, Share]:
    return {
        f"job-{number}": Share(f"job-{number}", owner, weights[number] if weights else 1.0)
        for number, owner in enumerate(owners)
    }


def test_weights_give_shares_on_four_replicas() -> None:
    weights = (1.0, 1.0, 4.0)
    simulated = Simulated(shares("a", "a", "a", weights=weights), dict.fromkeys(("job-0", "job-1", "job-2"), 10**6), 4)
    had = simulated.run(1000.0)
    for number, weight in enumerate(weights):
        assert had[f"job-{number}"] / sum(had.values()) == pytest.approx(weight / 6, rel=0.1)


def test_a_sweep_of_200_takes_half_of_what_its_owner_shares_with_another() -> None:
    jobs = shares(*["sweeper"] * 200, "other")
    had = Simulated(jobs, dict.fromkeys(jobs, 10**6)).run(4000.0)
    assert had["job-200"] / sum(had.values()) == pytest.approx(0.5, rel=0.02)
    swept = [had[f"job-{number}"] for number in range(200)]
    assert max(swept) - min(swept) <= SECONDS


def test_a_small_job_next_to_a_large_one_takes_little_longer_than_alone() -> None:
    """A step of 10 batches (100 samples) next to one of 1,000 (10,000 samples)."""
    jobs = shares("a", "b")
    with_other = Simulated(jobs, {"job-0": 10, "job-1": 1000})
    with_other.run(1e9)
    alone = Simulated({"job-0": jobs["job-0"]}, {"job-0": 10})
    alone.run(1e9)
    assert with_other.ended["job-0"] <= 2.5 * alone.ended["job-0"]


def test_time_without_work_is_not_saved_up() -> None:
    turns = Turns[str]()
    one, other = Share("one", "a"), Share("other", "b")
    for _ in range(10):
        turns.add(Waiting(one, "one", 1, 1.0))
        turns.ran(turns.next(1), SECONDS)
    for _ in range(3):
        turns.add(Waiting(one, "one", 1, 1.0))
        turns.add(Waiting(other, "other", 1, 1.0))
    order = []
    while turns:
        taken = turns.next(1)
        turns.ran(taken, SECONDS)
        order.append(taken[0].work)
    assert sorted(order[:2]) == sorted(order[2:4]) == ["one", "other"]


def test_jobs_with_one_key_go_together_up_to_the_rows_that_one_of_them_has() -> None:
    turns = Turns[str]()
    for name, key, rows in (("a", "k", 4), ("a", "k", 4), ("b", "k", 6), ("c", None, 4), ("d", "k", 8), ("e", "k", 4)):
        turns.add(Waiting(Share(name, "", 1.0, key, 16), name, rows, 1.0))
    taken = []
    while turns:
        taken.append([one.work for one in turns.next(32)])
    assert taken[0] == ["a", "b", "e"]
    assert sorted(taken[1:]) == [["c"], ["d", "a"]]  # d had nothing yet


def test_jobs_that_ended_are_forgotten() -> None:
    turns = Turns[str]()
    for number in range(3 * MAX_JOBS):
        turns.add(Waiting(Share(f"job-{number}", f"owner-{number}"), "", 1, 1.0))
        turns.ran(turns.next(1), SECONDS)
    assert len(turns._jobs) <= MAX_JOBS + 1
    assert len(turns._owners) <= MAX_JOBS + 1
