"""Measures what a reward's service costs: each scorer through its service, against a call of its function.

    python -m bench.rewards [--only jpeg ocr_line …] [--processes 1 2] [--groups 4] [--rounds 5]

The pictures are rendered: 512 × 512, a line or two of text on a noisy ground, PNG of about 0.5 MB. A batch is a group
of 16, as a controller sends it. The direct call decodes and scores on one thread of this process. In each round both
ways take the same batch, one after the other, which makes the round's ratio robust against other load. The table has
medians over rounds. `samples_per_s` is the service's rate with all groups sent at once.
"""

import asyncio
import io
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from bench import report
from bench.process import started
from flowfleet.process.service import keep_freed_memory
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


CASES: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "jpeg": ("jpeg_compressibility", {}, {}),
    "image_quality": ("image_quality", {}, {}),
    "ocr_line": ("ocr", {"region": "line"}, {}),
    "ocr_page": ("ocr", {"region": "page"}, {}),
    "python": ("python", {}, {"function": "bench.rewards:redness", "path": "."}),
}
"""Scorers with their parameters and settings."""


def main() -> None:
    flags = report.parser("rewards", __doc__)
    flags.add_argument("--only", nargs="+", default=[*CASES], choices=[*CASES], help="(all)")
    flags.add_argument("--processes", type=int, nargs="+", default=[1], help="of the service, one run each (1)")
    flags.add_argument("--groups", type=int, default=4, help="of 16 samples (4)")
    flags.add_argument("--rounds", type=int, default=5)
    options = flags.parse_args()
    keep_freed_memory()  # as the controller does, which calls rewards in a fleet
    rows = [
        measure(name, processes, options.groups, options.rounds)
        for name in options.only
        for processes in options.processes
    ]
    report.finish("rewards", options, rows, [*rows[0]])


def measure(name: str, processes: int, num_groups: int, rounds: int) -> dict[str, Any]:
    """Returns the row of a case."""
    scorer, _, settings = CASES[name]
    changes = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    samples = pictures(num_groups * GROUP)
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        flags = ["--port-file", str(port_file), "--scorer", scorer, *changes, "--processes", str(processes)]
        with started(port_file, "services.reward", *flags):
            figures = asyncio.run(_compare(name, samples, port_file.read_text(), rounds))
    print(name, processes, figures, flush=True)
    return {"case": name, "processes": processes, **figures}


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
        prompt = f'A sign that says "{" ".join(lines)}"'
        made.append(EncodedSample(buffer.getvalue(), "image/png", prompt, {}, str(index // GROUP), str(index)))
    return made


async def _compare(name: str, samples: Sequence[EncodedSample], address: str, rounds: int) -> dict[str, float]:
    kind, parameters, settings = CASES[name]
    scorer = make(kind, settings, 1)
    assert isinstance(scorer, Scorer)
    params, evaluate = scorer.parse(parameters), Evaluator(scorer, 0)
    batches = [samples[start : start + GROUP] for start in range(0, len(samples), GROUP)]
    direct: list[float] = []
    served: list[float] = []
    ratios: list[float] = []
    async with open_channel(address) as channel:
        described = await RewardServiceStub(channel).Describe(DescribeRequest(), timeout=DEADLINE_S)
        score = score_method(channel)

        async def call(samples: Sequence[EncodedSample]) -> None:
            response = await score(ScoreCall(samples, parameters).write(), timeout=DEADLINE_S)
            assert all(given.WhichOneof("outcome") == "score" for given in response.scores)

        async def ask(batch: Sequence[EncodedSample]) -> None:
            await asyncio.gather(*map(call, chunks(batch, GROUP, wished_bytes=described.call_bytes)))

        evaluate(batches[0], params)
        await ask(batches[0])
        for turn in range(rounds):
            batch = batches[turn % len(batches)]
            start = time.perf_counter()
            evaluate(batch, params)
            direct.append(time.perf_counter() - start)
            start = time.perf_counter()
            await ask(batch)
            served.append(time.perf_counter() - start)
            ratios.append(served[-1] / direct[-1])
        start = time.perf_counter()
        await asyncio.gather(*(ask(batch) for batch in batches))
        rate = len(samples) / (time.perf_counter() - start)
    evaluate.close()
    return {
        "direct_ms": 1000 * statistics.median(direct),
        "service_ms": 1000 * statistics.median(served),
        "ratio": statistics.median(ratios),
        "samples_per_s": rate,
    }


if __name__ == "__main__":
    main()
