"""What a job of `bench.rewards.learning` came to: its validations by several measures, and pictures of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flowfleet.client.client import Client
from flowfleet.client.types import Job, Sample
from flowfleet.media.files import decode_media
from flowfleet.media.image_stats import colour_entropy, edge_density
from recipes.tiny.signs import Pixels
from recipes.tiny_vlm.lessons import is_high, word_rise

NUM_PICTURES = 8
"""Number of held-out prompts whose pictures are kept at each validation: always the first ones, never picked."""
JUDGE = "judge"


@dataclass(frozen=True)
class Validation:
    """Means over the held-out prompts at a policy version."""

    version: int
    generated: int
    """Pictures made for training before it."""
    scores: Mapping[str, float]
    """Raw, by reward."""
    measures: Mapping[str, float]
    """`edge_density`, `colour_entropy`, `word_rise`; with a judge `judge_right`, the share of pictures where it says of
    the word's place what the pixels say."""
    spread: Mapping[str, float]
    """Standard error of each score's mean."""


@dataclass(frozen=True)
class Trained:
    """A finished job."""

    name: str
    seed: int
    settings: Mapping[str, Any]
    validations: Sequence[Validation]
    gated: int = 0
    """Training samples that a gate kept out."""
    judge: Mapping[str, float] = field(default_factory=dict)
    """What the judge's counters rose by."""

    @property
    def told(self) -> str:
        """Its scores before and after, for the console."""
        first, last = self.validations[0].scores, self.validations[-1].scores
        return ", ".join(f"{name} {first[name]:.3f} → {last[name]:.3f}" for name in sorted(first))

    @property
    def figures(self) -> dict[str, Any]:
        """All but the settings, which name folders of the machine."""
        return {name: value for name, value in asdict(self).items() if name != "settings"}

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "run.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Trained:
        """Reads a run.json."""
        data = json.loads(path.read_text())
        data["validations"] = [Validation(**one) for one in data["validations"]]
        return cls(**data)


def record(client: Client, job: Job, name: str, directory: Path) -> Trained:
    """Fetches what a finished job left; its first held-out pictures go to DIRECTORY/pictures.npz, by version."""
    rollout = job.spec["rollout"]
    per_step = rollout["prompts_per_step"] * rollout["group_size"]
    versions = sorted({event.data["version"] for event in client.events(job.id) if event.type == "validation"})
    validations, kept = [], {}
    for version in versions:
        samples = sorted(client.samples(job.id, purpose="validate", step=version), key=lambda sample: sample.group)
        pictures = [decode_media(client.media(job.id, sample), sample.media_type)[0] for sample in samples]
        kept[str(version)] = np.stack(pictures[:NUM_PICTURES])
        validations.append(validation_of(version, version * per_step, samples, pictures, sorted(job.spec["rewards"])))
        words = [sample.prompt for sample in samples[:NUM_PICTURES]]
    directory.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {"prompts": np.array(words), **kept}
    np.savez_compressed(directory / "pictures.npz", **arrays)
    gated = sum(count for reason, count in job.progress.samples_dropped.items() if reason.startswith("gated_"))
    return Trained(name, int(job.spec["seed"]), job.spec, validations, gated)


def validation_of(
    version: int, generated: int, samples: Sequence[Sample], pictures: Sequence[Pixels], rewards: Sequence[str]
) -> Validation:
    """Summarizes the held-out samples at a version. Samples without a reward's score are left out of its mean."""
    scores = {name: [score for s in samples if (score := s.scores.get(name)) is not None] for name in rewards}
    measures = {
        "edge_density": statistics.fmean(map(edge_density, pictures)),
        "colour_entropy": statistics.fmean(map(colour_entropy, pictures)),
        "word_rise": statistics.fmean(map(word_rise, pictures)),
    }
    if JUDGE in rewards:
        measures["judge_right"] = statistics.fmean(
            ((score > 0.5) == is_high(picture))
            for sample, picture in zip(samples, pictures, strict=True)
            if (score := sample.scores.get(JUDGE)) is not None
        )
    return Validation(
        version,
        generated,
        {name: statistics.fmean(values) for name, values in scores.items()},
        measures,
        {name: float(np.std(values) / np.sqrt(len(values))) for name, values in scores.items()},
    )
