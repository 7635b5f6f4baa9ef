"""What a data set costs the controller: opening a job that has it, and the prompts of a step.

    python -m bench.scale.prompts [--prompts 20000 1000000] [--per-step 512] [--steps 4000]

The file is read by the controller's own reader. While it is opened in a thread, the event loop notes how late it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import tempfile
import time
from pathlib import Path

from bench.scale.figures import percentiles
from flowfleet.job.spec import JobSpec, parse_job
from services.controller.api.admission import open_job
from services.controller.prompts.data import Deal
from services.controller.prompts.mixture import Mixture
from services.controller.prompts.sources import Sources
from services.controller.reading.places import Places

BEAT_S = 0.01


def write(folder: Path, number: int) -> JobSpec:
    """A job and its prompts, with metadata as a reward reads it."""
    rows = (
        {"prompt": f'A photograph of a sign that says "{k}"', "metadata": {"target": str(k)}} for k in range(number)
    )
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(folder / "prompts.jsonl")}
    return parse_job({"model": {"path": str(folder)}, "rewards": {"ocr": {}}, "data": data})


async def opened(spec: JobSpec, folder: Path) -> tuple[Deal, float, dict[str, float]]:
    """The deal, seconds, and how late the event loop was meanwhile."""
    sources = Sources(Places.of([folder], [], folder / "state"))
    late: list[float] = []

    async def beat() -> None:
        while True:
            due = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)
            late.append(time.monotonic() - due)

    beating = asyncio.create_task(beat())
    began = time.monotonic()
    data = await asyncio.to_thread(open_job, spec, sources)
    took = time.monotonic() - began
    beating.cancel()
    sources.close()
    mixture = Mixture(spec.data.each, spec.seed, spec.rollout.prompts_per_step)
    return Deal(data.training, mixture), took, percentiles(late)


def measure(number: int, per_step: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = write(folder, number)
        spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"prompts_per_step": per_step})})
        deal, took, late = asyncio.run(opened(spec, folder))
    costs = []
    for step in range(steps):
        began = time.process_time()
        deal.of_step(step)
        costs.append(time.process_time() - began)
    a_step = percentiles(costs)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{number} prompts: opened in {took:.1f} s, event loop late p99 {1e3 * late['p99']:.0f} ms, most "
        f"{1e3 * late['max']:.0f} ms; a step of {per_step}: mean {1e3 * sum(costs) / steps:.2f} ms, p50 "
        f"{1e3 * a_step['p50']:.2f} ms, most (a pass is shuffled) {1e3 * a_step['max']:.1f} ms; {memory:.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[20_000, 1_000_000])
    parser.add_argument("--per-step", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args()
    for number in options.prompts:
        measure(number, options.per_step, options.steps)


if __name__ == "__main__":
    main()
