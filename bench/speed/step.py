"""What do services cost? The same job as services and in one process, alternating in one run.

    python -m bench.speed.step [--steps 8] [--rounds 2]

Prints the median seconds of a training step and of its phases for both, their ratio, and what share of the services'
step each phase has. The bar is a ratio of at most 1.10. The first step of each round is a warm-up and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.speed.monolith import Monolith
from flowfleet.client.client import Client
from flowfleet.job.files import data_folders
from flowfleet.job.spec import parse_job, read_job_file
from flowfleet.local.plan import StackOptions
from flowfleet.local.session import local_stack
from flowfleet.process.service import usable_cpus

RECIPE = Path("recipes/tiny_ocr.toml")
PHASES = ("gen", "reward", "update_actor", "update_weights")
BAR = 1.10

Rows = list[Mapping[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="measured steps a round (8)")
    parser.add_argument("--rounds", type=int, default=2, help="(2)")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    threads = usable_cpus()
    job = bench_job(options.steps + 1)
    spec = parse_job(job)
    monolith = Monolith(spec, Path(spec.data.each[0].path).read_text().splitlines(), threads)
    alone: Rows = []
    services: Rows = []
    with tempfile.TemporaryDirectory() as state:
        stack = StackOptions(state_dir=Path(state), port=0, data_roots=data_folders(spec), model=spec.model.path)
        with local_stack(stack) as running, Client(running.url) as client:
            for number in range(options.rounds):
                alone += [monolith.step(number * spec.schedule.steps + step) for step in range(spec.schedule.steps)][1:]
                services += run_as_services(client, job)[1:]
    figures = compare(alone, services)
    print(table(figures, len(services), threads))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


def bench_job(steps: int) -> dict[str, Any]:
    """The demo's job without validation, and one checkpoint at its end."""
    job = read_job_file(RECIPE)
    job["data"].pop("validation", None)
    job["schedule"] |= {"steps": steps, "save_every": steps}
    return job


def run_as_services(client: Client, job: dict[str, Any]) -> Rows:
    """Seconds by phase of every step."""
    done = client.wait(client.submit(job).id, timeout_s=1800)
    assert done.status == "succeeded", done.reason
    rows = [row.values for row in client.metrics(done.id)]
    names = {phase: f"timing_s/{phase}" for phase in (*PHASES, "step")}
    return [{phase: float(row[name] or 0.0) for phase, name in names.items()} for row in rows]


def compare(alone: Rows, services: Rows) -> dict[str, dict[str, float]]:
    """Medians by phase for both; `other` is what no phase accounts for."""
    return {"one process": _medians(alone), "services": _medians(services)}


def table(figures: dict[str, dict[str, float]], num_steps: int, threads: int) -> str:
    alone, services = figures["one process"], figures["services"]
    lines = [f"{num_steps} steps each, {threads} threads; medians in seconds", ""]
    lines.append(f"{'phase':<16}{'one process':>12}{'services':>12}{'share':>9}")
    for phase in (*PHASES, "other", "step"):
        share = services[phase] / services["step"]
        lines.append(f"{phase:<16}{alone[phase]:>12.3f}{services[phase]:>12.3f}{share:>9.1%}")
    ratio = services["step"] / alone["step"]
    lines += ["", f"ratio of step time: {ratio:.3f} ({'within' if ratio <= BAR else 'over'} the bar of {BAR:.2f})"]
    return "\n".join(lines)


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found = {phase: statistics.median(row[phase] for row in rows) for phase in (*PHASES, "step")}
    found["other"] = statistics.median(row["step"] - sum(row[phase] for phase in PHASES) for row in rows)
    return found


if __name__ == "__main__":
    main()
