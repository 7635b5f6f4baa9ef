"""A job's progress as people follow it: live on a terminal, a line a step elsewhere. Fed with the job's events."""

import math
import time
from collections.abc import Callable, Iterable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flowfleet.api.answers import read
from flowfleet.api.jobs import Job, JobEvent, JobStatus, Progress

LIVE_HZ = 4
ENDS = {str(status) for status in JobStatus if status.terminal}


class JobView:
    """Follows a job's events and says in words and figures how far the job is. Pure apart from its clock. Events start
    with the job's first. They are history until they reach the step at which the job was looked up."""

    def __init__(self, job: Job, clock: Callable[[], float] = time.monotonic) -> None:
        self.status = "queued"
        self.reason = ""
        self.progress = Progress(steps=job.progress.steps)
        self.first_held_out: float | None = None
        self._clock = clock
        self._created, self._seen, self._seen_at = job.created_at, 0.0, clock()
        self._job = job
        self._reached = math.inf if job.ended else job.progress.step
        self._told_eta = clock()
        self._last_line = ""

    @property
    def is_history(self) -> bool:
        """True while the events seen so far had happened before the job was looked up."""
        return self.progress.step < self._reached and self.status not in ENDS

    @property
    def elapsed_s(self) -> float:
        """Seconds since the job was submitted, by the time of the last event and this machine's clock since then."""
        return self._seen + self._clock() - self._seen_at

    def update(self, event: JobEvent) -> None:
        """Takes one event in; types that say nothing of progress change nothing."""
        self._seen, self._seen_at = max(self._seen, (event.time - self._created).total_seconds()), self._clock()
        if event.type == "status":
            self.status, self.reason = str(event.data["status"]), str(event.data.get("reason", ""))
            if event.final and self._job.ended:  # of its history only the end may be kept
                self.progress = self._job.progress
        elif event.type == "progress":
            known = {name: value for name, value in event.data.items() if name in Progress.model_fields}
            self.progress = read(Progress, {**self.progress.model_dump(), **known})
            if "eta_s" in known:
                self._told_eta = self._clock()
            if self.first_held_out is None:
                self.first_held_out = self.progress.held_out_reward

    def time_left(self) -> str:
        if self.progress.eta_s is None:
            return "–"
        return duration(max(0.0, self.progress.eta_s - (self._clock() - self._told_eta)))

    def figures(self) -> list[tuple[str, str]]:
        """Names and values in the order they are shown."""
        shown = self.progress
        held_out = number(shown.held_out_reward)
        if self.first_held_out is not None and self.first_held_out != shown.held_out_reward:
            held_out = f"{number(self.first_held_out)} → {held_out}"
        return [
            ("step", f"{shown.step}/{shown.steps}"),
            ("phase", f"{shown.phase or self.status}{done_of(shown)}"),
            ("reward", number(shown.reward)),
            ("held out", held_out),
            ("images/s", "–" if shown.images_per_second is None else f"{shown.images_per_second:.1f}"),
            ("left", self.time_left()),
        ]

    def line(self) -> str | None:
        """Returns one plain line, or None if it would only repeat the last one."""
        shown = self.progress
        tenth = 10 * (shown.samples_sampled + shown.samples_scored) // max(1, 2 * shown.samples)
        key = f"{shown.step} {tenth if done_of(shown) else ''} {shown.held_out_reward} {self.status} {self.reason}"
        if key == self._last_line:
            return None
        self._last_line = key
        figures = "  ".join(f"{name} {value}" for name, value in self.figures())
        return f"{duration(self.elapsed_s):>6}  {self.status:<9}  {figures}" + (
            f"  ({self.reason})" if self.reason else ""
        )

    def __rich__(self) -> RenderableType:
        shown = self.progress
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=max(1, shown.steps), completed=shown.step, width=36, complete_style="cyan"),
            Text(f"{self.status}, {duration(self.elapsed_s)}"),
        )
        body = Table.grid(padding=(0, 3))
        figures = self.figures()
        body.add_row(*(Text(name, style="bright_black") for name, _ in figures))
        body.add_row(*(Text(value, style="bold") for _, value in figures))
        return Group(head, body, Text(self.reason, style="yellow")) if self.reason else Group(head, body)


def follow(job: Job, events: Iterable[JobEvent], console: Console) -> JobView:
    """Shows a job until its events end, and returns what was last known. Of its history only where it led to."""
    view = JobView(job)
    if not console.is_terminal:
        for event in events:
            view.update(event)
            if not view.is_history and (line := view.line()) is not None:
                console.print(line, highlight=False, soft_wrap=True)
        return view
    with Live(view, console=console, refresh_per_second=LIVE_HZ):
        for event in events:
            view.update(event)
    return view


def done_of(progress: Progress) -> str:
    """How far the step at work is, to follow its phase; empty once it has all its scores."""
    if progress.phase not in ("rollout", "score") or not progress.samples:
        return ""
    return f": {progress.samples_sampled} of {progress.samples} samples, {progress.samples_scored} scored"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def duration(seconds: float) -> str:
    """1:05 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
