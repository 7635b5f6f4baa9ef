"""Views of jobs, samples and processes that the command line prints."""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowfleet.api.fleet import Fleet
from flowfleet.api.jobs import Job
from flowfleet.api.samples import Sample
from flowfleet.cli.options import out, tell
from flowfleet.client.progress import duration, number
from flowfleet.client.uploading import value_at
from flowfleet.job.spec import JobSpec
from flowfleet.job.sweeps import label
from flowfleet.local.stack import Stack

SHORT_ID = 13
"""Characters of a job id that its milliseconds fill: enough to tell jobs apart."""

COLORS = {
    "running": "cyan",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
    "paused": "yellow",
    "quarantined": "red",
}


def table(*columns: str) -> Table:
    made = Table(box=None, padding=(0, 3, 0, 0), header_style="bright_black")
    for column in columns:
        made.add_column(column)
    return made


def jobs_table(jobs: Iterable[Job]) -> Table:
    made = table("ID", "NAME", "STATUS", "STEP", "REWARD", "HELD OUT", "AGE")
    for job in jobs:
        progress, age = job.progress, datetime.now(UTC) - job.created_at
        changed = [step for step in progress.rewards_changed if step < progress.step]
        made.add_row(
            job.id[:SHORT_ID],
            f"{job.name}  {label(job.sweep.settings)}" if job.sweep else job.name,
            status_text(job.status) + Text(" (warning)" if progress.warning else "", style="yellow"),
            f"{progress.step}/{progress.steps}",
            number(progress.reward) + (f" since step {changed[-1]}" if changed else ""),
            number(progress.held_out_reward),
            duration(age.total_seconds()),
        )
    return made


def status_text(status: str) -> Text:
    return Text(status, style=COLORS.get(status, ""))


def show_job(job: Job, console: Console) -> None:
    """Prints the facts of one job."""
    facts = Table.grid(padding=(0, 3))
    progress = job.progress
    dropped = ", ".join(f"{count} {reason}" for reason, count in progress.samples_dropped.items())
    causes = (f"{reason}: {cause}" for reason, cause in progress.drop_causes.items())
    rows: list[tuple[str, str | Text]] = [
        ("id", job.id),
        ("name", job.name),
        ("sweep", f"{job.sweep.name}  {label(job.sweep.settings)}" if job.sweep else ""),
        ("status", status_text(job.status)),
        ("reason", job.reason),
        ("queue", _queue(job)),
        ("created", job.created_at.isoformat(timespec="seconds")),
        ("started", job.started_at.isoformat(timespec="seconds") if job.started_at else ""),
        ("ended", job.ended_at.isoformat(timespec="seconds") if job.ended_at else ""),
        ("step", f"{progress.step}/{progress.steps}  {progress.phase}"),
        ("reward", number(progress.reward)),
        ("rewards", _change_of(job)),
        ("held-out reward", number(progress.held_out_reward)),
        ("samples", f"{progress.samples_trained} trained, {dropped or 'none'} dropped"),
        ("first causes", "\n".join(causes)),
        *((name, _plain(value)) for name, value in job.results.items()),
    ]
    for name, value in rows:
        if value:
            facts.add_row(Text(name, style="bright_black"), value)
    console.print(facts)
    show_warnings([*job.warnings, *filter(None, [progress.warning])], console)
    console.print("\nsettings other than the defaults:\n" + as_yaml(_settings(job)), highlight=False)


def _queue(job: Job) -> str:
    """A job's place in the queue; empty where it does not wait there."""
    if job.place is None:
        return ""
    starts = f", starts in about {duration(job.starts_in_s)}" if job.starts_in_s is not None else ""
    return f"{job.place} before it, priority {job.priority}{starts}"


def _change_of(job: Job) -> str:
    """Since when the reward is of other rewards than before; empty while they are as submitted."""
    active = job.rewards.active
    return f"changed at step {active.from_step}: {'; '.join(active.changes)}" if active.number else ""


def _settings(job: Job) -> dict[str, Any]:
    """The job's settings without defaults, with the steps that it has now; all of a job of another release."""
    try:
        shown = JobSpec.model_validate(job.spec).model_dump(mode="json", exclude_defaults=True)
    except ValidationError:
        return job.spec
    return {**shown, "schedule": {**shown.get("schedule", {}), "steps": job.progress.steps}}


def say(job: Job, as_json: bool) -> None:
    """Prints the result of a request."""
    wish = f", to be {job.desired}" if str(job.desired) != str(job.status) else ""
    text = f"{job.id}  {job.status}{wish}, step {job.progress.step} of {job.progress.steps}"
    tell(job, as_json, lambda: out.print(text, highlight=False))


def show_warnings(warnings: Iterable[str], console: Console) -> None:
    """Prints the warnings of a job."""
    for warning in warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)


def show_uploads(spec: JobSpec, job: Job, console: Console) -> None:
    """Prints which data of a submitted job were uploaded."""
    for setting, before, _ in spec.data_files:
        if (now := value_at(job.spec, setting)) != before:
            console.print(Text(f"{setting}: uploaded {before} as {now}"), soft_wrap=True)


def show_fleet(fleet: Fleet, console: Console) -> None:
    """Replicas by pool, rewards, and why pods find no place."""
    replicas = table("POOL", "REPLICA", "HEALTH", "VERSION", "OUTSTANDING", "DEVICE", "ADDRESS")
    for replica in sorted(fleet.replicas, key=lambda replica: (replica.pool, replica.replica_id)):
        version = "" if replica.version is None else str(replica.version)
        facts = (replica.health, version, str(replica.outstanding), replica.device, replica.address)
        replicas.add_row(replica.pool, replica.replica_id, *facts)
    for pool in sorted(set(fleet.pools or ()) - {replica.pool for replica in fleet.replicas}):
        replicas.add_row(pool, "none")
    rewards = table("REWARD", "ADDRESSES")
    for name, addresses in sorted(fleet.rewards.items()):
        rewards.add_row(name, ", ".join(addresses) or "none")
    console.print(replicas, rewards, sep="\n\n")
    for shortage in fleet.shortages:
        console.print(
            Text(f"\n{shortage.component} {shortage.name}: {shortage.reason}", style="yellow"), soft_wrap=True
        )


def samples_table(samples: Sequence[Sample], files: Sequence[Path | None]) -> Table:
    made = table("SAMPLE", "REWARD", "SCORES", "PROMPT", *(["FILE"] if files else []))
    for index, sample in enumerate(samples):
        scores = ", ".join(f"{name} {number(score)}" for name, score in sample.scores.items())
        row = [f"{sample.step}/{sample.group}/{sample.index}", number(sample.reward)]
        row.append(" ".join(filter(None, (sample.drop_reason, sample.drop_cause))) or scores)
        made.add_row(*row, Text(sample.prompt), *([str(files[index] or "no longer kept")] if files else []))
    return made


def show_stack(stack: Stack, console: Console) -> None:
    """Its processes, and which accelerators they and trainers use."""
    made = table("PROCESS", "PID", "ADDRESS", "ENGINE", "DEVICE", "LOG")
    for name, process in stack.processes.items():
        devices = ", ".join(process.devices)
        made.add_row(name, str(process.pid), process.address, process.engine or "", devices, process.log)
    console.print(made)
    if stack.trainer_devices:
        console.print(f"\nDevices of trainers: {', '.join(stack.trainer_devices)}", highlight=False)
    if stack.warning:
        console.print(Text(f"\nwarning: {stack.warning}", style="yellow"), soft_wrap=True)


def as_yaml(value: object) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110).rstrip()


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
