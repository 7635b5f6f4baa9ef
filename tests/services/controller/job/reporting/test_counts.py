"""Progress of the step at work shows as it grows, in few events."""

from __future__ import annotations

from services.controller.job.machine.batch import Batch
from services.controller.job.reporting import counts
from services.controller.job.reporting.counts import Counts, ProgressTold, counts_of


def test_counts_of_a_step() -> None:
    batch = Batch.opened(0, num_groups=4, group_size=3, at=0.0)
    assert counts_of(None) == (0, 0, 0)
    assert counts_of(batch) == (12, 0, 0)
    for group, index, status in ((0, 0, "sampled"), (0, 1, "sampled"), (1, 0, "scored"), (2, 2, "dropped")):
        batch.move(group, batch.groups[group][index], status)  # type: ignore[arg-type]
    assert counts_of(batch) == Counts(samples=11, samples_sampled=3, samples_scored=1)


def test_a_long_step_makes_few_events() -> None:
    """1,000 samples in 1,000 s, each told half a second after it came and scored at once."""
    now = 0.0
    told = ProgressTold(lambda: now)
    assert told.tells("rollout", Counts(1000, 0, 0)) is True  # a new phase shows at once
    answers = []
    for tick in range(1, 2001):
        now = tick / 2
        answers.append(told.tells("rollout", Counts(1000, tick // 2, tick // 2)))
    assert answers.count(True) == counts.ANNOUNCED_PARTS
    shown = sum(answer is not None for answer in answers)
    assert 1000 / counts.SHOW_EVERY_S - 2 <= shown <= 1000 / counts.SHOW_EVERY_S + 1
    assert told.tells("train", Counts(1000, 1000, 1000)) is True
    now += 60
    assert told.tells("train", Counts(1000, 1000, 1000)) is None  # nothing changed


def test_a_short_step_makes_none_but_those_of_its_phases() -> None:
    now = 0.0
    told = ProgressTold(lambda: now)
    answers = [told.tells("rollout", Counts(8, 0, 0))]
    for done in range(1, 9):
        now += 0.5
        answers.append(told.tells("rollout", Counts(8, done, 0)))
    assert answers.count(True) == 1
