"""Do votes turn a model? A program votes for warm colors (mean of red minus blue), wrong in one vote of ten, through
the controller's REST as a person does on the page; the control votes at random.

    python -m bench.learning.votes [--seeds 1 2 3] [--control] [--votes 500] [--set KEY=VALUE …]

The figures are a line of JSON a seed: the held-out mean of red minus blue (−255 … 255) before and after training; the
standard deviation of that mean before it, which is that of its pictures over the root of their number; and the rise in
standard deviations of the mean and of the pictures.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowfleet.client.client import Client
from flowfleet.client.types import ApiError
from flowfleet.client.votes import Choice, VotePair
from flowfleet.job.files import RECIPES, data_folders, prepare_job
from flowfleet.local.plan import StackOptions
from flowfleet.local.session import local_stack
from flowfleet.media.files import decode_media

RECIPE = Path("tiny_votes")
VALIDATION = RECIPES / "tiny" / "prompts" / "validation.txt"
HELD_OUT = 64
"""Held-out pictures that are compared."""
ERRORS = 0.1
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


def held_out(client: Client, job_id: str, version: int) -> list[float]:
    """Warmth of the held-out pictures at a version."""
    samples = client.samples(job_id, purpose="validate", step=version)
    return [warmth(client.media(job_id, sample), sample.media_type) for sample in samples]


def train(seed: int, errors: float, most_votes: int, changes: Sequence[str], directory: Path) -> dict[str, Any]:
    """One job with a voter, on a stack of its own."""
    held_out_prompts = directory / "held_out.txt"
    held_out_prompts.write_text("".join(VALIDATION.read_text().splitlines(keepends=True)[:HELD_OUT]))
    changes = [f"seed={seed}", f"data.validation={held_out_prompts}", *changes]
    spec = prepare_job(RECIPE, changes, same_machine=True)
    options = StackOptions(
        state_dir=directory / "stack",
        port=0,
        data_roots=data_folders(spec),
        rewards=("human",),
        model=spec.model.path,
        dtype=spec.model.dtype,
    )
    started = time.monotonic()
    with local_stack(options) as stack, Client(stack.url) as client:
        job = client.submit(spec)
        voter = Voter(stack.url, job.id, errors, seed, most_votes)
        voter.start()
        ended = client.wait(job.id, 1800)
        voter.stopped.set()
        voter.join(30)
        if voter.failure is not None or ended.status != "succeeded":
            raise RuntimeError(f"the job {ended.status}: {ended.reason}; the voter: {voter.failure}")
        before, after = (held_out(client, job.id, version) for version in (0, ended.progress.step))
        report = client.vote_report(job.id)
    spread = statistics.stdev(before)
    of_mean = spread / len(before) ** 0.5
    rise = statistics.fmean(after) - statistics.fmean(before)
    return {
        "before": round(statistics.fmean(before), 2),
        "after": round(statistics.fmean(after), 2),
        "std_of_mean": round(of_mean, 2),
        "rise_in_std_of_mean": round(rise / of_mean, 2),
        "rise_in_std_of_pictures": round(rise / spread, 2),
        "held_out": len(before),
        "votes": voter.given,
        "consistency": report.voters[0].consistency if report.voters else None,
        "repeats": report.voters[0].repeats if report.voters else 0,
        "steps": ended.progress.step,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    options = _parser().parse_args()
    for seed in options.seeds:
        with tempfile.TemporaryDirectory(prefix="votes-") as scratch:
            errors = 0.5 if options.control else ERRORS
            found = train(seed, errors, options.votes, options.set, Path(scratch))
        settings = {"voter": "random" if options.control else "warm", "errors": errors, "seed": seed}
        print(json.dumps({"bench": "votes", "settings": settings, **found}), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.learning.votes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--control", action="store_true", help="vote at random")
    parser.add_argument("--votes", type=int, default=500, help="votes at most (500)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the job; repeatable")
    return parser


if __name__ == "__main__":
    sys.exit(main())
