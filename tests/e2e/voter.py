"""A program that votes for warm colors (mean of red minus blue) through the controller's REST, as a person does on the
page, and a job that it turns.

The figures of a job: the held-out mean of red minus blue (−255 … 255) before and after training; the standard deviation
of that mean before training, which is that of its pictures over the root of their number; and the rise in standard
deviations of the mean and of the pictures.
"""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowfleet.api.problems import ApiError
from flowfleet.api.votes import Choice, VotePair
from flowfleet.client.client import Client
from flowfleet.job.files import RECIPES, data_folders, prepare_job
from flowfleet.local.plan import StackOptions
from flowfleet.local.pools import Pool
from flowfleet.local.session import local_stack
from flowfleet.media.files import decode_media

RECIPE = Path("tiny_votes")
VALIDATION = RECIPES / "tiny" / "prompts" / "validation.txt"
HELD_OUT = 64
"""Held-out pictures that are compared."""
ERRORS = 0.1
"""Share of votes for the colder side."""
POLL_S = 0.2


def warmth(media: bytes, media_type: str) -> float:
    """Mean of red minus blue over all pixels, −255 … 255."""
    frames = decode_media(media, media_type).astype(float)
    return float((frames[..., 0] - frames[..., 2]).mean())


@dataclass
class Voter(threading.Thread):
    """Votes on a job until it has given all its votes or is stopped. `errors`: share of votes for the other side; 0.5
    votes at random."""

    url: str
    job_id: str
    errors: float
    seed: int
    most: int
    given: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        super().__init__(name="voter", daemon=True)
        self._draw = random.Random(self.seed)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        try:
            with Client(self.url) as client:
                while self.given < self.most and not self.stopped.is_set():
                    self._vote(client)
        except Exception as error:
            self.failure = error

    def _vote(self, client: Client) -> None:
        pairs = client.next_votes(self.job_id, "program", count=20).pairs
        for pair in pairs[: self.most - self.given]:
            try:
                client.vote(self.job_id, pair, self._choice(client, pair), "program")
            except ApiError as error:
                if error.status not in (404, 409):
                    raise
            else:
                self.given += 1
        if not pairs:
            self.stopped.wait(POLL_S)

    def _choice(self, client: Client, pair: VotePair) -> Choice:
        left, right = (warmth(client.side(side), side.media_type) for side in (pair.left, pair.right))
        is_left = left > right
        return "left" if is_left != (self._draw.random() < self.errors) else "right"


def train(seed: int, most_votes: int, directory: Path) -> dict[str, Any]:
    """One job with a voter, on a stack of its own below the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    held_out_prompts = directory.absolute() / "held_out.txt"
    held_out_prompts.write_text("".join(VALIDATION.read_text().splitlines(keepends=True)[:HELD_OUT]))
    spec = prepare_job(RECIPE, [f"seed={seed}", f"data.validation={held_out_prompts}"], same_machine=True)
    options = StackOptions(
        state_dir=directory / "stack",
        port=0,
        data_roots=data_folders(spec),
        rewards=("human",),
        pools=(Pool(model=spec.model.path, dtype=spec.model.dtype),),
    )
    with local_stack(options) as stack, Client(stack.url) as client:
        job = client.submit(spec)
        program = Voter(stack.url, job.id, ERRORS, seed, most_votes)
        program.start()
        ended = client.wait(job.id, 1800)
        program.stopped.set()
        program.join(30)
        if program.failure is not None or ended.status != "succeeded":
            raise RuntimeError(f"the job {ended.status}: {ended.reason}; the voter: {program.failure}")
        versions = sorted({event.data["version"] for event in client.events(job.id) if event.type == "validation"})
        warmths = [held_out(client, job.id, version) for version in (versions[0], versions[-1])]
    return {"votes": program.given, **rise(warmths)}


def held_out(client: Client, job_id: str, version: int) -> list[float]:
    """Warmth of the held-out pictures at a version."""
    samples = client.samples(job_id, purpose="validate", step=version)
    return [warmth(client.media(job_id, sample), sample.media_type) for sample in samples]


def rise(warmths: Sequence[Sequence[float]]) -> dict[str, float]:
    """What the mean warmth did from the first pictures to the last."""
    before, after = warmths[0], warmths[-1]
    spread = statistics.stdev(before)
    of_mean = spread / len(before) ** 0.5
    change = statistics.fmean(after) - statistics.fmean(before)
    return {
        "before": round(statistics.fmean(before), 2),
        "after": round(statistics.fmean(after), 2),
        "std_of_mean": round(of_mean, 3),
        "rise_in_std_of_mean": round(change / of_mean, 2),
        "rise_in_std_of_pictures": round(change / spread, 2),
        "held_out": len(before),
    }
