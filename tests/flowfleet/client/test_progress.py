"""What people see of a job, from events with chosen times."""

import io
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from flowfleet.api.jobs import Job, JobEvent, JobStatus, Progress
from flowfleet.client.progress import JobView, duration, follow

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def job() -> Job:
    return Job.model_validate(
        {"id": "j", "name": "n", "status": "queued", "desired": "running", "spec": {}, "created_at": NOW}
        | {"progress": {"steps": 12}}
    )


def event(kind: str, **data: Any) -> JobEvent:
    return JobEvent(id="1-0", type=kind, time=NOW, data=data)


EVENTS = [
    event("status", status="running", previous="queued", reason=""),
    event("progress", phase="rollout"),
    event("progress", held_out_reward=0.5),
    event("validation", version=0, **{"val/reward": 0.5}),
    event("progress", step=1, reward=0.25, images_per_second=12.34, eta_s=65.0, not_known_here=1),
    event("progress", phase="train"),
    event("progress", held_out_reward=0.75),
    event("status", status="succeeded", previous="running", reason=""),
]


def test_figures_follow_the_events() -> None:
    now = [0.0]
    view = JobView(job(), clock=lambda: now[0])
    for item in EVENTS:
        view.update(item)
    now[0] = 5.0

    assert dict(view.figures()) == {
        "step": "1/12",
        "phase": "train",
        "reward": "0.250",
        "held out": "0.500 → 0.750",
        "images/s": "12.3",
        "left": "1:00",
    }
    assert view.status == "succeeded"


def test_without_a_terminal_a_line_is_printed_for_each_step_validation_and_status() -> None:
    text = io.StringIO()
    follow(job(), EVENTS, Console(file=text, force_terminal=False, width=40))

    lines = text.getvalue().splitlines()
    assert len(lines) == 5
    assert "step 1/12" in lines[2]
    assert "reward 0.250" in lines[2]
    assert "left 1:05" in lines[2]
    assert lines[-1].split()[1] == "succeeded"


def later(item: JobEvent, seconds: float) -> JobEvent:
    return item.model_copy(update={"time": NOW + timedelta(seconds=seconds)})


def test_of_a_job_that_runs_the_history_is_not_told_again() -> None:
    """Watched from its tenth step on: one line leads there, with the job's own time and its first held-out reward."""
    steps = [event("progress", step=step, reward=step / 100) for step in range(1, 12)]
    history = [event("status", status="running"), event("progress", held_out_reward=0.5), *steps]
    held_out = event("progress", held_out_reward=0.75)
    events = [later(item, 10.0 * index) for index, item in enumerate([*history, held_out])]
    running = job().model_copy(update={"status": JobStatus.RUNNING})
    running = running.model_copy(update={"progress": Progress(step=10, steps=12, held_out_reward=0.5, reward=0.1)})
    text = io.StringIO()
    follow(running, events, Console(file=text, force_terminal=False))

    lines = text.getvalue().splitlines()
    assert [(line.split()[0], line.split()[3]) for line in lines] == [
        ("1:50", "10/12"),
        ("2:00", "11/12"),
        ("2:10", "11/12"),
    ]
    assert "held out 0.500  " in lines[0]
    assert "held out 0.500 → 0.750" in lines[-1]


def test_of_a_job_that_ended_its_end_is_told() -> None:
    text = io.StringIO()
    ended = job().model_copy(update={"status": JobStatus.SUCCEEDED, "progress": Progress(step=12, steps=12)})
    for kept in (EVENTS, EVENTS[-1:]):
        follow(ended, kept, Console(file=text, force_terminal=False))

    lines = text.getvalue().splitlines()
    assert [(line.split()[1], line.split()[3]) for line in lines] == [("succeeded", "12/12")] * 2


def test_on_a_terminal_the_last_state_stays_on_the_screen() -> None:
    text = io.StringIO()
    failed = event("status", status="failed", reason="the disk is [full]")
    follow(job(), [*EVENTS[:-1], failed], Console(file=text, force_terminal=True, width=100))

    screen = text.getvalue()
    assert "0.500 → 0.750" in screen
    assert "the disk is [full]" in screen


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (4000.2, "1:06:40")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
