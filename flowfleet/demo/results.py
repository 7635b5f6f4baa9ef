"""Fetches a finished job by REST, and summarizes it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowfleet.api.jobs import Job, JobEvent, MetricsRow
from flowfleet.api.samples import Sample
from flowfleet.client.client import Client
from flowfleet.demo.plots import Curve, Pair
from flowfleet.demo.statistics import paired_bootstrap
from flowfleet.media.files import Frames, decode_media

NUM_PAIRS = 24
"""Held-out prompts in the picture grid."""
STEP_PHASES = ("rollout", "score", "train")
"""Phases of a training step; one that samples nothing appears in a later step only."""
STRIP_FRAMES = 5
"""Frames of a video in that grid."""


@dataclass(frozen=True)
class Outcome:
    """A finished job, its events and rows, and its held-out samples before and after training, prompt by prompt."""

    job: Job
    events: Sequence[JobEvent]
    rows: Sequence[MetricsRow]
    before: Sequence[Sample]
    after: Sequence[Sample]

    @property
    def validations(self) -> list[dict[str, Any]]:
        """Data of the validation events, by version."""
        found = {event.data["version"]: event.data for event in self.events if event.type == "validation"}
        return [found[version] for version in sorted(found)]

    @property
    def pairs(self) -> list[tuple[Sample, Sample]]:
        """The same prompt and seed before and after, both scored."""
        after = {sample.group: sample for sample in self.after if sample.reward is not None}
        scored = [sample for sample in self.before if sample.reward is not None]
        return [(sample, after[sample.group]) for sample in scored if sample.group in after]


def fetch(client: Client, job_id: str, events: Sequence[JobEvent]) -> Outcome:
    """Raises ValueError for a job without a validation before and one after training."""
    job = client.job(job_id)
    versions = sorted({event.data["version"] for event in events if event.type == "validation"})
    if len(versions) < 2:
        raise ValueError("the job validated less than twice: set data.validation, and schedule.steps to 1 or more")
    before, after = (
        list(client.samples(job_id, purpose="validate", step=version, order="oldest"))
        for version in (versions[0], versions[-1])
    )
    return Outcome(job, events, list(client.metrics(job_id)), before, after)


def fetch_pairs(client: Client, outcome: Outcome) -> Iterator[Pair]:
    """The first `NUM_PAIRS` held-out prompts with their pictures: not picked, as they come."""
    for before, after in outcome.pairs[:NUM_PAIRS]:
        first, last = (_pixels(client.media(outcome.job.id, sample), sample.media_type) for sample in (before, after))
        yield Pair(before.prompt, first, last, before.reward, after.reward)


def fetch_texts(client: Client, outcome: Outcome) -> str:
    """The first `NUM_PAIRS` held-out prompts, each with what was written before and after training, and the scores."""
    lines = list[str]()
    for before, after in outcome.pairs[:NUM_PAIRS]:
        lines.append(before.prompt)
        for name, sample in (("before", before), ("after", after)):
            lines.append(f"  {name} ({sample.reward:.2f}): {client.media(outcome.job.id, sample).decode()}")
    return "\n".join([*lines, ""])


def _pixels(media: bytes, media_type: str) -> NDArray[np.uint8]:
    frames = decode_media(media, media_type)
    return frames[0] if len(frames) == 1 else film_strip(frames)


def film_strip(frames: Frames) -> NDArray[np.uint8]:
    """Up to `STRIP_FRAMES` frames, evenly spaced from the first to the last, side by side with white between them.

    frames: (F, H, W, 3). Returns (H, W', 3) with W' = shown · W + (shown − 1) · max(1, W // 16).
    """
    shown = frames[np.linspace(0, len(frames) - 1, min(STRIP_FRAMES, len(frames))).round().astype(int)]
    gap = np.full((frames.shape[1], max(1, frames.shape[2] // 16), 3), 255, dtype=np.uint8)
    parts = [part for frame in shown for part in (gap, frame)]
    return np.concatenate(parts[1:], axis=1)


def training_curve(rows: Iterable[MetricsRow]) -> Curve:
    """Mean reward of each step's samples, over the samples trained on before them."""
    trained, samples, rewards = 0, list[int](), list[float]()
    for row in rows:
        reward, total = row.values.get("critic/rewards/mean"), row.values.get("training/samples")
        if reward is not None and total is not None:
            samples.append(trained)
            rewards.append(reward)
            trained = int(total)
    return Curve(samples, rewards)


def held_out_curve(outcome: Outcome) -> Curve:
    """Mean held-out reward of each validated version, over the samples that it was trained on."""
    totals = {row.step + 1: row.values.get("training/samples") for row in outcome.rows}
    known = [item for item in outcome.validations if item["val/reward"] is not None]
    return Curve([int(totals.get(item["version"]) or 0) for item in known], [item["val/reward"] for item in known])


def _watched(outcome: Outcome, seed: int) -> dict[str, dict[str, Any]]:
    """The rewards of weight 0: means over the pairs that both have a score, and the gain's interval."""
    found: dict[str, dict[str, Any]] = {}
    for name, part in outcome.job.spec["rewards"].items():
        if part["weight"] == 0:
            scores = [[sample.scores.get(name) for sample in pair] for pair in outcome.pairs]
            known = [(first, last) for first, last in scores if first is not None and last is not None]
            if known:
                before, after = zip(*known, strict=True)
                interval = list(paired_bootstrap(before, after, seed))
                found[name] = {"before": fmean(before), "after": fmean(after), "bootstrap_ci95": interval}
    return found


def summarize(outcome: Outcome, started: datetime, ended: datetime) -> dict[str, Any]:
    """The content of summary.json. `started` and `ended` are those of the whole demo."""
    job, first, last = outcome.job, outcome.validations[0], outcome.validations[-1]
    before, after = ([sample.reward or 0.0 for sample in side] for side in zip(*outcome.pairs, strict=True))
    first_step, last_step = _training_span(outcome)
    seed = int(job.spec["seed"])
    return {
        "job_id": job.id,
        "seed": seed,
        "held_out_prompts": len(before),
        "held_out_reward_before": first["val/reward"],
        "held_out_reward_after": last["val/reward"],
        "improvement": last["val/reward"] - first["val/reward"],
        "bootstrap_ci95": list(paired_bootstrap(before, after, seed)),
        "watched": _watched(outcome, seed),
        **{
            f"{name}_{when}": side.get(f"val/{name}")
            for name in ("edge_density", "colour_entropy")
            for when, side in (("before", first), ("after", last))
        },
        "steps": job.progress.step,
        "samples_trained": job.progress.samples_trained,
        "samples_dropped": sum(job.progress.samples_dropped.values()),
        "seconds_to_first_step": (first_step - started).total_seconds(),
        "training_seconds": (last_step - first_step).total_seconds(),
        "total_seconds": (ended - started).total_seconds(),
        "seconds_by_phase": _seconds_by_phase(outcome.rows),
        "settings": job.spec,
    }


def _training_span(outcome: Outcome) -> tuple[datetime, datetime]:
    """From the start of the first training step's sampling to the end of the last step's update."""
    progress = [event for event in outcome.events if event.type == "progress"]
    first = next(event.time for event in progress if event.data.get("phase") in STEP_PHASES)
    last = next(event.time for event in progress if event.data.get("step") == outcome.job.progress.steps)
    return first, last


def _seconds_by_phase(rows: Iterable[MetricsRow]) -> dict[str, float]:
    """Sums of the rows' `timing_s/…`."""
    totals: dict[str, float] = {}
    for row in rows:
        for name, value in row.values.items():
            if name.startswith("timing_s/") and value is not None:
                phase = name.removeprefix("timing_s/")
                totals[phase] = round(totals.get(phase, 0.0) + value, 3)
    return totals
