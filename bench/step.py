"""Measures what services cost: the demo's job as services and in one process, in alternating rounds.

    python -m bench.step [--steps 8] [--rounds 2]

The table has the median seconds of a training step and of its phases for both, and each phase's share of the services'
step. The bar is a ratio of at most 1.10. The first step of each round warms up and is left out.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from flowfleet.client.client import Client
from flowfleet.job.files import data_folders
from flowfleet.job.spec import parse_job, read_job_file
from flowfleet.local.plan import StackOptions
from flowfleet.local.session import local_stack
from flowfleet.process.service import usable_cpus
from tests.monolith import Monolith

RECIPE = Path("recipes/tiny_ocr.toml")
PHASES = ("gen", "reward", "update_actor", "update_weights")
BAR = 1.10

Rows = list[Mapping[str, float]]


def main() -> None:
    parser = report.parser("step", __doc__)
    parser.add_argument("--steps", type=int, default=8, help="measured steps a round (8)")
    parser.add_argument("--rounds", type=int, default=2, help="(2)")
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
                print(f"round {number + 1} of {options.rounds}: one process is done", file=sys.stderr, flush=True)
                services += run_as_services(client, job)[1:]
    rows = compare(alone, services)
    report.finish("step", options, rows, [*rows[0]])
    ratio = rows[-1]["ratio"]
    print(f"services / one process: {ratio:.3f}, {'within' if ratio <= BAR else 'over'} the bar of {BAR:.2f}")


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


def compare(alone: Rows, services: Rows) -> list[dict[str, Any]]:
    """A row per phase, and the whole step last. `other` is what no phase accounts for."""
    one, many = _medians(alone), _medians(services)
    return [
        {
            "phase": phase,
            "one_process_s": one[phase],
            "services_s": many[phase],
            "share": many[phase] / many["step"],
            "ratio": many[phase] / one[phase] if one[phase] else None,
        }
        for phase in (*PHASES, "other", "step")
    ]


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found = {phase: statistics.median(row[phase] for row in rows) for phase in (*PHASES, "step")}
    found["other"] = statistics.median(row["step"] - sum(row[phase] for phase in PHASES) for row in rows)
    return found


if __name__ == "__main__":
    main()
