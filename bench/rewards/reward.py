"""What does the service cost? Each scorer through its service, against calling its function directly.

    python -m bench.rewards.reward [--only jpeg clip …] [--processes 1 2] [--threads 1 2] [--rounds 5] [--json FILE]

The pictures are rendered: 512 × 512, a line or two of text on a noisy ground, PNG of about 0.5 MB; of `motion`, videos
of 9 frames of 128 × 128. A batch is a group of 16, as a controller sends it. Directly means: decode and score on one
thread, in this process. In each round both ways take the same batches, one after the other, so that the ratio of a
round is less disturbed by what else the machine does; medians over rounds are shown, of wall time and of the CPU
seconds of all processes on either side. After that all groups are sent at once; `Describe` is asked fifty times a
second meanwhile: the slowest answer says whether the service's event loop stays free. Models have their published size
and random weights, and run on the first GPU where there is one; their service has one process. Scorers that ask others
are measured by `bench.rewards.judge`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image, ImageDraw, ImageFont

from bench.rewards.service import cpu_seconds, running
from flowfleet.media.files import decode_media, encode_media
from flowfleet.process.service import keep_freed_memory, usable_cpus
from flowfleet.proto.reward_pb2 import DescribeRequest
from flowfleet.proto.reward_pb2_grpc import RewardServiceStub
from flowfleet.rewards.requests import EncodedSample, ScoreCall, score_method
from flowfleet.rpc.endpoint import open_channel
from services.controller.rewards.chunking import chunks
from services.reward.execution.evaluator import Evaluator
from services.reward.scorer import Scorer
from services.reward.scorers import make

SIZE, GROUP = 512, 16
WORDS = ("OPEN", "Slow Down", "Fresh Bread", "Gate 42", "No Parking", "Grand Opening", "Mind the Gap", "Exit Only")
DEADLINE_S = 600.0
ASK_EVERY_S = 0.02


@dataclass(frozen=True)
class Case:
    """A scorer with its settings and parameters."""

    scorer: str
    params: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    video: bool = False
    model: str = ""
    """Whose checkpoint `bench.rewards.models` makes."""

    @property
    def flags(self) -> list[str]:
        changes = [part for key, value in self.settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        return ["--scorer", self.scorer, *changes]

    def made(self, folder: Path) -> Case:
        """Builds the scorer, with a checkpoint where it needs one."""
        if not self.model:
            return self
        from bench.rewards.models import settings_of  # torch and transformers, which other scorers do without

        return replace(self, settings={**self.settings, **settings_of(self.model, folder)})


CASES = {
    "jpeg": Case("jpeg_compressibility"),
    "image_quality": Case("image_quality"),
    "motion": Case("motion", video=True),
    "ocr_line": Case("ocr", {"region": "line"}),
    "ocr_page": Case("ocr", {"region": "page"}),
    "python": Case("python", settings={"function": "bench.rewards.reward:redness", "path": "."}),
}
MODELS = {
    "clip_base": Case("clip", model="clip-base"),
    **{name: Case(name, model=name) for name in ("clip", "pickscore", "hps", "aesthetic", "geneval")},
}
OBJECTS = {"geneval": json.dumps({"tag": "single_object", "include": [{"class": "dog", "count": 1}]})}
"""What every sample has in its metadata, for `geneval`."""


@dataclass(frozen=True)
class Figures:
    """Medians over rounds. `ratio` is the service's time of a batch to that of the function."""

    case: str
    processes: int
    threads: int
    direct_ms: float
    """Time to score a batch of 16 sample by sample."""
    service_ms: float
    ratio: float
    added_ms: float
    direct_cpu_ms: float
    """CPU of a sample."""
    service_cpu_ms: float
    rate: float
    """Samples a second with all groups at once."""
    slowest_describe_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*CASES], choices=[*CASES, *MODELS], help="(those without models)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1], help="of the service, one run each (1)")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1], help="of the service's own process, likewise (1)"
    )
    parser.add_argument("--groups", type=int, default=4, help="of 16 samples (4)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    keep_freed_memory()  # as the controller does, which is the caller in a fleet
    before = os.getloadavg()
    rows: list[Figures] = []
    for name in options.only:
        for processes, threads in itertools.product(options.processes, options.threads):
            rows.append(one(name, processes, threads, options.groups, options.rounds))
            machine = {"cpus": usable_cpus(), "load_before": before, "load_after": os.getloadavg()}
            if options.json:
                text = json.dumps(
                    {"machine": machine, "rounds": options.rounds, "figures": [asdict(row) for row in rows]}, indent=2
                )
                options.json.write_text(text + "\n")


def one(name: str, processes: int, threads: int, num_groups: int, rounds: int) -> Figures:
    """A case, printed too."""
    with tempfile.TemporaryDirectory() as folder:
        case = (CASES | MODELS)[name].made(Path(folder))
        samples = (videos if case.video else pictures)(num_groups * GROUP)
        flags = [*case.flags, "--processes", str(processes), "--threads", str(threads)]
        with running(Path(folder), *flags) as (process, address):
            figures = asyncio.run(_compare(name, case, processes, threads, samples, process, address, rounds))
    print(
        f"{name:<14} {processes} process(es), {threads} thread(s): {figures.direct_ms:.1f} ms directly, "
        f"{figures.service_ms:.1f} through the service (× {figures.ratio:.2f}); CPU of a sample "
        f"{figures.direct_cpu_ms:.1f} and {figures.service_cpu_ms:.1f} ms; {figures.rate:.1f} samples/s at once, "
        f"slowest Describe {figures.slowest_describe_ms:.0f} ms",
        flush=True,
    )
    return figures


def redness(picture: Image.Image, prompt: str, metadata: Mapping[str, str]) -> float:
    """The function of the case `python`."""
    return float(np.asarray(picture)[..., 0].mean()) / 255


def pictures(number: int) -> list[EncodedSample]:
    """Text at random places on colored boards before noise, from seed 0."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(number):
        pixels = rng.normal(120, 12, (SIZE, SIZE, 3)) + np.linspace(-60, 60, SIZE)[:, None, None]
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        lines = [str(word) for word in rng.choice(WORDS, rng.integers(1, 3), replace=False)]
        draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=int(rng.integers(28, 60)))
        place = (int(rng.integers(20, 80)), int(rng.integers(30, 300)))
        left, top, right, bottom = draw.multiline_textbbox(place, "\n".join(lines), font=font)
        draw.rectangle((left - 15, top - 15, right + 15, bottom + 15), fill=(235, 230, 220))
        draw.multiline_text(place, "\n".join(lines), font=font, fill=(30, 30, 40))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        made.append(_sample(index, buffer.getvalue(), "image/png", f'A sign that says "{" ".join(lines)}"'))
    return made


def as_jpeg(samples: Sequence[EncodedSample]) -> list[EncodedSample]:
    """The same pictures as JPEGs of quality 90, of about 80 kB."""
    made = []
    for index, sample in enumerate(samples):
        buffer = io.BytesIO()
        Image.fromarray(decode_media(sample.media, sample.media_type)[0]).save(buffer, "JPEG", quality=90)
        made.append(_sample(index, buffer.getvalue(), "image/jpeg", sample.prompt))
    return made


def videos(number: int) -> list[EncodedSample]:
    """A bright square that moves to the right over a dark ground."""
    made = []
    for index in range(number):
        frames = np.full((9, 128, 128, 3), 30, np.uint8)
        for time_, frame in enumerate(frames):
            frame[40 : 60 + index % 20, 8 * time_ : 8 * time_ + 20] = 220
        made.append(_sample(index, *encode_media(frames), "a square moves to the right"))
    return made


def _sample(index: int, media: bytes, media_type: str, prompt: str) -> EncodedSample:
    group = str(index // GROUP)
    return EncodedSample(media, media_type, prompt, OBJECTS, group, str(index))


async def _compare(
    name: str,
    case: Case,
    processes: int,
    threads: int,
    samples: Sequence[EncodedSample],
    process: psutil.Process,
    address: str,
    rounds: int,
) -> Figures:
    scorer = make(case.scorer, case.settings, 1)
    assert isinstance(scorer, Scorer)
    params, evaluate = scorer.parse(case.params), Evaluator(scorer, 0)
    batches = list(groups(samples))
    direct: list[float] = []
    served: list[float] = []
    ratios: list[float] = []
    cpu = [0.0, 0.0]
    async with open_channel(address) as channel:
        described = await RewardServiceStub(channel).Describe(DescribeRequest(), timeout=DEADLINE_S)
        score = score_method(channel)

        async def call(samples: Sequence[EncodedSample]) -> None:
            response = await score(ScoreCall(samples, case.params).write(), timeout=DEADLINE_S)
            assert all(given.WhichOneof("outcome") == "score" for given in response.scores)

        async def ask(batch: Sequence[EncodedSample]) -> None:
            await asyncio.gather(*map(call, chunks(batch, GROUP, wished_bytes=described.call_bytes)))

        evaluate(batches[0], params)
        await ask(batches[0])
        for turn in range(rounds):
            batch = batches[turn % len(batches)]
            spent, start = time.process_time(), time.perf_counter()
            evaluate(batch, params)
            direct.append(time.perf_counter() - start)
            cpu[0] += time.process_time() - spent
            spent, start = time.process_time() + cpu_seconds(process), time.perf_counter()
            await ask(batch)
            served.append(time.perf_counter() - start)
            cpu[1] += time.process_time() + cpu_seconds(process) - spent
            ratios.append(served[-1] / direct[-1])
        asking = asyncio.create_task(_slowest_describe(address))
        start = time.perf_counter()
        await asyncio.gather(*(ask(batch) for batch in batches))
        rate = len(samples) / (time.perf_counter() - start)
        asking.cancel()
        slowest = await asking
    evaluate.close()
    return Figures(
        case=name,
        processes=processes,
        threads=threads,
        direct_ms=1000 * statistics.median(direct),
        service_ms=1000 * statistics.median(served),
        ratio=statistics.median(ratios),
        added_ms=1000 * statistics.median(late - early for early, late in zip(direct, served, strict=True)),
        direct_cpu_ms=1000 * cpu[0] / rounds / GROUP,
        service_cpu_ms=1000 * cpu[1] / rounds / GROUP,
        rate=rate,
        slowest_describe_ms=1000 * slowest,
    )


async def _slowest_describe(address: str) -> float:
    """Keeps calling Describe until cancelled; returns the slowest answer."""
    slowest = 0.0
    async with open_channel(address) as channel:
        with suppress(asyncio.CancelledError):
            while True:
                start = time.perf_counter()
                await RewardServiceStub(channel).Describe(DescribeRequest(), timeout=DEADLINE_S)
                slowest = max(slowest, time.perf_counter() - start)
                await asyncio.sleep(ASK_EVERY_S)
    return slowest


def groups(samples: Sequence[EncodedSample]) -> Iterator[Sequence[EncodedSample]]:
    return (samples[start : start + GROUP] for start in range(0, len(samples), GROUP))


if __name__ == "__main__":
    main()
