"""The judgment of hangs against a model of ranks: no live trainer is accused, every hung one is, in time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.controller.job.trainer.hangs import HangJudge, Progress

HANG_S = 5.0
LOOK_S = 0.5
LIMITS = {"work": HANG_S, "compile": 60.0, "checkpoint": 30.0, "idle": HANG_S}
SILENCE = {**dict.fromkeys(LIMITS, HANG_S), "compile": LIMITS["compile"]}


@dataclass
class Ranks:
    """Ranks in simulated time; `tell` is what rank 0 answers, None once it is stopped."""

    count: list[int] = field(default_factory=lambda: [0, 0])
    signs: list[int] = field(default_factory=lambda: [0, 0])
    phase: list[str] = field(default_factory=lambda: ["work", "work"])
    stopped: list[bool] = field(default_factory=lambda: [False, False])

    def tell(self) -> list[Progress] | None:
        if self.stopped[0]:
            return None
        for rank in (0, 1):
            if not self.stopped[rank]:
                self.signs[rank] += 1
        return [
            Progress(rank, phase, LIMITS[phase], self.count[rank], self.signs[rank], SILENCE[phase])
            for rank, phase in enumerate(self.phase)
        ]


def run(judge: HangJudge, ranks: Ranks, start_s: float, seconds: float, *, beats: bool) -> tuple[float, str] | None:
    """Looks twice a second; when the judge accuses, how many seconds after the start, and its words."""
    now = start_s
    while now < start_s + seconds:
        now += LOOK_S
        if beats:
            ranks.count = [count + 1 for count in ranks.count]
        if reason := judge.look(now, ranks.tell()):
            return now - start_s, reason
    return None


@pytest.mark.parametrize(
    ("rank", "words"), [(0, "rank 0 (phase work) gave no sign for"), (1, "rank 1 (phase work) gave no sign for")]
)
def test_a_stopped_rank_costs_the_limit_and_is_named(rank: int, words: str) -> None:
    judge, ranks = HangJudge(HANG_S), Ranks()
    assert run(judge, ranks, 0.0, 100.0, beats=True) is None
    ranks.stopped[rank] = True
    accused = run(judge, ranks, 100.0, 100.0, beats=False)  # the other rank waits for it in a collective
    assert accused is not None
    assert HANG_S < accused[0] <= HANG_S + 2 * LOOK_S
    assert words in accused[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_while_it_waits_for_a_command_is_noticed(rank: int) -> None:
    judge, ranks = HangJudge(HANG_S), Ranks(phase=["idle", "idle"])
    assert run(judge, ranks, 0.0, 1000.0, beats=False) is None
    ranks.stopped[rank] = True
    accused = run(judge, ranks, 1000.0, 2 * HANG_S, beats=False)
    assert accused is not None
    assert f"rank {rank} (phase idle)" in accused[1]


def test_ranks_that_live_and_make_no_progress_are_accused() -> None:
    accused = run(HangJudge(HANG_S), Ranks(), 0.0, 100.0, beats=False)
    assert accused is not None
    assert accused[0] <= HANG_S + 2 * LOOK_S
    assert "rank 0 (phase work), rank 1 (phase work) made no progress" in accused[1]


def test_a_rank_that_never_got_the_command_hides_no_hang() -> None:
    accused = run(HangJudge(HANG_S), Ranks(phase=["work", "idle"]), 0.0, 100.0, beats=False)
    assert accused is not None
    assert "rank 0 (phase work) made no progress" in accused[1]


@pytest.mark.parametrize("phase", ["idle", "work"])
def test_a_rank_whose_last_sign_came_after_the_last_progress_is_named(phase: str) -> None:
    judge, ranks = HangJudge(HANG_S), Ranks(phase=["work", phase])
    assert run(judge, ranks, 0.0, 100.0, beats=True) is None
    assert run(judge, ranks, 100.0, HANG_S / 3, beats=False) is None  # its sign takes a while to rank 0
    ranks.stopped[1] = True
    accused = run(judge, ranks, 102.0, 100.0, beats=False)
    assert accused is not None
    assert accused[0] <= HANG_S
    assert f"rank 1 (phase {phase}) gave no sign" in accused[1]


def test_a_rank_waits_for_one_that_compiles_and_has_its_whole_limit_afterwards() -> None:
    judge, ranks = HangJudge(HANG_S), Ranks()
    ranks.phase[1] = "compile"
    assert run(judge, ranks, 0.0, LIMITS["compile"] - 1.0, beats=False) is None
    ranks.phase[1] = "work"
    assert run(judge, ranks, 59.0, HANG_S - 1.0, beats=False) is None
    assert run(judge, ranks, 63.0, 3.0, beats=False) is not None


def test_a_silent_compilation_is_judged_by_the_phase_that_was_heard_last() -> None:
    judge, ranks = HangJudge(HANG_S), Ranks(phase=["compile", "work"])
    assert run(judge, ranks, 0.0, 1.0, beats=True) is None
    ranks.stopped[0] = True  # it holds the interpreter's lock
    assert run(judge, ranks, 1.0, LIMITS["compile"] - 2.0, beats=False) is None
    assert run(judge, ranks, 60.0, 10.0, beats=False) is not None


def test_progress_has_the_limit_of_the_phase_and_silence_its_own() -> None:
    judge, ranks = HangJudge(HANG_S), Ranks(phase=["checkpoint", "checkpoint"])
    assert run(judge, ranks, 0.0, LIMITS["checkpoint"] - 1.0, beats=False) is None
    assert judge.doubt == ""
    judge, ranks = HangJudge(HANG_S), Ranks(phase=["checkpoint", "checkpoint"])
    assert run(judge, ranks, 0.0, 1.0, beats=True) is None
    ranks.stopped[1] = True
    assert run(judge, ranks, 1.0, HANG_S - 1.0, beats=True) is None
    assert judge.doubt == "rank 1 (phase checkpoint) gives no sign: the trainer is replaced if that lasts 5 s"
    accused = run(judge, ranks, HANG_S, HANG_S, beats=True)
    assert accused is not None
    assert "rank 1 (phase checkpoint) gave no sign" in accused[1]


def test_a_controller_that_was_suspended_accuses_nobody() -> None:
    judge, ranks = HangJudge(HANG_S), Ranks()
    judge.look(0.0, ranks.tell())
    assert judge.look(1e6, None) is None
    assert judge.look(1e6 + 1.0, ranks.tell()) is None


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(sorted(LIMITS)),
            st.floats(0.0, 0.9, allow_nan=False),  # the share of its limit that a unit takes
            st.integers(1, 4),  # units
            st.booleans(),  # rank 0 waits for rank 1 in a collective instead of working itself
            st.floats(0.0, 1e4),  # for how long the controller is suspended after it
        ),
        max_size=12,
    ),
    start_s=st.floats(0.0, 1e6),
    dies=st.sampled_from([None, 0, 1]),
)
def test_no_live_trainer_is_accused_and_every_dead_one_in_time(
    steps: list[tuple[str, float, int, bool, float]], start_s: float, dies: int | None
) -> None:
    judge, ranks, now = HangJudge(HANG_S), Ranks(), start_s
    judge.look(now, ranks.tell())
    for phase, share, units, waits, suspended_s in steps:
        ranks.phase = ["work" if waits else phase, phase]
        for _ in range(units):
            ranks.count = [ranks.count[0] + (not waits), ranks.count[1] + 1]
            until = now + share * (LIMITS[phase] - 2 * LOOK_S)
            while now < until:
                now += LOOK_S
                assert (waits and phase == "idle") or judge.look(now, ranks.tell()) is None, "a live trainer"
        ranks.phase = ["idle", "idle"]
        now += suspended_s
        assert judge.look(now, ranks.tell()) is None
    if dies is not None:
        ranks.phase = ["work", "work"]
        judge.look(now, ranks.tell())
        ranks.stopped[dies] = True
        assert run(judge, ranks, now, HANG_S + 2 * LOOK_S, beats=False) is not None
