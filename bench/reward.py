"""Does the OCR reward keep up? Pictures a second of one call of the scorer, and of the service with some processes.

    python -m bench.reward [--processes 1 2] [--groups 6] [--region line page]

The pictures are rendered: 512 × 512, a line or two of text on a noisy ground, PNG of about 0.5 MB. They are sent as the
controller sends them, in groups of 16 and all at once. `Describe` is asked fifty times a second meanwhile: how long the
slowest answer took says whether the service's event loop stays free.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
from PIL import Image, ImageDraw, ImageFont

from flowfleet.jobs import RewardPart
from flowfleet.proto.reward_pb2 import DescribeRequest, RewardSample
from flowfleet.proto.reward_pb2_grpc import RewardServiceStub
from flowfleet.rpc import open_channel
from flowfleet.service import usable_cpus
from services.controller.directory import StaticDirectory
from services.controller.rewards import RewardPlane
from services.reward.evaluator import Evaluator
from services.reward.scorers import make

SIZE, GROUP = 512, 16
WORDS = ("OPEN", "Slow Down", "Fresh Bread", "Gate 42", "No Parking", "Grand Opening", "Mind the Gap", "Exit Only")
DEADLINE_S = 600.0
ASK_EVERY_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="of the service, one run each (1 2)")
    parser.add_argument("--groups", type=int, default=6, help="of 16 pictures (6)")
    parser.add_argument("--region", nargs="+", default=["line", "page"], choices=["line", "page"])
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    samples = pictures(options.groups * GROUP)
    size = statistics.fmean(len(sample.media) for sample in samples)
    print(f"{len(samples)} pictures of {SIZE} × {SIZE}, {size / 1e6:.2f} MB each; {usable_cpus()} CPUs\n")
    print(f"{'region':<8}{'how':<22}{'images/s':>10}{'to direct':>11}{'CPU ms/image':>14}{'slowest Describe':>18}")
    rows = []
    for region in options.region:
        alone = direct(samples, region)
        for figures in [alone, *(service(samples, region, processes) for processes in options.processes)]:
            rows.append({"region": region} | asdict(figures))
            print(f"{region:<8}{line(figures, alone)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


@dataclass(frozen=True)
class Figures:
    """Pictures a second, CPU seconds a picture over all processes, and seconds of the slowest `Describe` meanwhile."""

    how: str
    rate: float
    cpu_s: float
    describe_s: float | None = None


def line(figures: Figures, alone: Figures) -> str:
    waited = "" if figures.describe_s is None else f"{1000 * figures.describe_s:.0f} ms"
    ratio = figures.rate / alone.rate
    return f"{figures.how:<22}{figures.rate:>10.2f}{ratio:>11.2f}{1000 * figures.cpu_s:>14.0f}{waited:>18}"


def pictures(number: int) -> list[RewardSample]:
    """Text at random places on coloured boards before noise, from seed 0."""
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
        made.append(
            RewardSample(
                sample_id=str(index),
                media=buffer.getvalue(),
                media_type="image/png",
                prompt=f'A sign that says "{" ".join(lines)}"',
                group_id=str(index // GROUP),
            )
        )
    return made


def direct(samples: Sequence[RewardSample], region: str) -> Figures:
    """The functions themselves: decode and score in this process on one thread."""
    scorer = make("ocr", {}, 1)
    params, evaluate = scorer.parse({"region": region}), Evaluator(scorer, 1)
    evaluate(samples[:2], params)
    start, cpu = time.perf_counter(), time.process_time()
    for group in groups(samples):
        evaluate(group, params)
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    evaluate.close()
    return Figures("direct, one thread", len(samples) / seconds, cpu_s / len(samples))


def service(samples: Sequence[RewardSample], region: str, processes: int) -> Figures:
    """The service as a process, with so many more where it is not one."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), processes) as (process, address):
        return asyncio.run(_ask(samples, region, process, address, processes))


async def _ask(
    samples: Sequence[RewardSample], region: str, process: psutil.Process, address: str, processes: int
) -> Figures:
    plane = RewardPlane({"ocr": RewardPart(params={"region": region})}, StaticDirectory({"ocr": address}), DEADLINE_S)
    try:
        await plane.score(samples[: 4 * processes])
        asking = asyncio.create_task(_slowest_describe(address))
        start, cpu = time.perf_counter(), cpu_seconds(process)
        verdicts = await asyncio.gather(*(plane.score(group) for group in groups(samples)))
        seconds, cpu_s = time.perf_counter() - start, cpu_seconds(process) - cpu
        asking.cancel()
        assert all(verdict.score is not None for part in verdicts for verdict in part.values())
        how = f"service, {processes} process{'es' if processes > 1 else ''}"
        return Figures(how, len(samples) / seconds, cpu_s / len(samples), await asking)
    finally:
        await plane.close()


def cpu_seconds(process: psutil.Process) -> float:
    """Of a process and those below it, so far."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


async def _slowest_describe(address: str) -> float:
    """Until it is cancelled."""
    slowest = 0.0
    async with open_channel(address) as channel:
        with suppress(asyncio.CancelledError):
            while True:
                start = time.perf_counter()
                await RewardServiceStub(channel).Describe(DescribeRequest(), timeout=DEADLINE_S)
                slowest = max(slowest, time.perf_counter() - start)
                await asyncio.sleep(ASK_EVERY_S)
    return slowest


def groups(samples: Sequence[RewardSample]) -> Iterator[Sequence[RewardSample]]:
    return (samples[start : start + GROUP] for start in range(0, len(samples), GROUP))


@contextmanager
def running(folder: Path, processes: int) -> Iterator[tuple[psutil.Process, str]]:
    """A reward service that is up, and its address. With one process it has one thread as well."""
    port_file = folder / "port"
    argv = [sys.executable, "-m", "services.reward", "--scorer", "ocr", "--port-file", str(port_file)]
    flags = ["--processes", str(processes), "--threads", "1", "--log-level", "warning"]
    process = psutil.Popen([*argv, *flags])
    try:
        while not port_file.exists():
            assert process.poll() is None, "the service did not start"
            time.sleep(0.05)
        yield process, port_file.read_text()
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
