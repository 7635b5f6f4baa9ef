"""A report passes where everything held, and names everything that did not."""

from __future__ import annotations

import pytest

from tests.faults.ledger import Entry, Ledger
from tests.faults.report import Report, Samples, as_markdown, figures, summary

SAMPLES = Samples(
    asked=60,
    trained=59,
    dropped={"no_score_brightness": 1},
    drops_injected=("3/1/0",),
    drops_found=("3/1/0",),
)


def entry(number: int, kind: str, recovery_s: float | None, phase: str = "train", *, counted: bool = True) -> Entry:
    return Entry(number, kind, "controller", phase, phase=phase, counted=counted, recovery_s=recovery_s)


def report(**changes: object) -> Report:
    good = {
        "mode": "lora",
        "seed": 1,
        "faults_asked": 2,
        "faults_counted": 2,
        "job_status": "succeeded",
        "steps": 10,
        "steps_done": 10,
        "samples": SAMPLES,
        "weights": "abc",
        "reference": "abc",
    }
    return Report.model_validate(good | changes)


def test_a_run_in_which_everything_held_has_passed() -> None:
    assert report().passed
    assert summary(report())[-1] == "passed"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"faults_counted": 1}, "only 1 of 2 faults counted"),
        ({"job_status": "failed", "job_reason": "no disk"}, "the job is failed: no disk"),
        ({"interrupted": True}, "the run was interrupted"),
        ({"failures": ("fault 3: was not replaced",)}, "fault 3: was not replaced"),
        ({"weights": "other"}, "the weights other are not the reference's abc"),
        ({"weights": "", "reference": ""}, "the weights - are not"),
        ({"samples": SAMPLES.model_copy(update={"doubled": 2})}, "2 samples are doubled and 0 are lost"),
        ({"samples": SAMPLES.model_copy(update={"lost": 1})}, "0 samples are doubled and 1 are lost"),
        ({"samples": SAMPLES.model_copy(update={"drops_found": ()})}, "['3/1/0'] were not"),
        ({"samples": SAMPLES.model_copy(update={"drops_found": ("3/1/0", "4/0/0")})}, "['4/0/0'] were dropped as well"),
    ],
)
def test_what_did_not_hold_is_named(changes: dict[str, object], problem: str) -> None:
    found = report(**changes)
    assert not found.passed
    assert any(problem in line for line in found.problems)


def test_figures_are_of_the_faults_that_counted() -> None:
    entries = [
        entry(0, "kill", 2.0),
        entry(1, "kill", 4.0, "publish"),
        entry(2, "kill", 9.0),
        entry(3, "kill", 100.0, counted=False),
        entry(4, "stop", None),
    ]
    found = figures(entries)
    assert (found["kill"].counted, found["kill"].recovery_median_s, found["kill"].recovery_max_s) == (3, 4.0, 9.0)
    assert found["kill"].phases == {"train": 2, "publish": 1}
    assert (found["stop"].counted, found["stop"].recovery_median_s, found["stop"].recovery_max_s) == (1, None, None)


def test_the_tables_of_the_documentation_have_a_row_a_kind() -> None:
    kinds = figures([entry(0, "kill", 2.0), entry(1, "stop", 3.5, "export")])
    text = as_markdown([report(kinds=kinds), report(mode="full", kinds=kinds)])
    assert "|  | lora, seed 1 | full, seed 1 |" in text
    assert text.count("| kill | 1 | 0 | 0 | 1 | 0 | 0 | 0 | 2.0 | 2.0 |") == 2
    assert text.count("| stop | 1 | 0 | 0 | 0 | 0 | 0 | 1 | 3.5 | 3.5 |") == 2
    widths = {line.count("|") for line in text.split("\n\n")[0].splitlines()}
    assert widths == {4}


def test_a_ledger_has_a_line_a_fault_as_it_happens(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("ledger") / "chaos.jsonl"
    ledger = Ledger(path)
    ledger.add(entry(0, "kill", 2.0))
    ledger.add(entry(1, "stop", None, counted=False))
    assert ledger.num_counted == 1
    assert [line.split('"kind": "')[1][:4] for line in path.read_text().splitlines()] == ["kill", "stop"]
