"""How long a job stands still after a process of its stack was killed, and where that time goes.

    python -m bench.scale.recovery [--times 5] [--kinds rank agent controller rollout reward] [--json FILE]

A tiny job (LoRA, two ranks, one rollout, one reward) runs on this machine's CPUs. A process is killed in mid-step; the
job has recovered when the step that was interrupted is applied. `undisturbed` is the same wait without a kill. For
trainers the controller's and the trainer's logs tell the parts: each ends with the line named in `PARTS`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from flowfleet.client.client import Client
from flowfleet.client.types import Job
from flowfleet.job.spec import read_job_file
from flowfleet.local.plan import StackOptions
from flowfleet.local.session import local_stack
from flowfleet.local.stack import Stack

ROOT = Path(__file__).parents[2]
KINDS = ("undisturbed", "rank", "agent", "controller", "rollout", "reward")
PARTS = {
    "detection": ("controller", ("trainer ended unexpectedly", "TrainStep(", "Publish(", "Checkpoint(")),
    "end and start of the process": ("controller", ("trainer started",)),
    "imports and rendezvous": ("trainer", ("serving on",)),
    "model and checkpoint": ("trainer", ("configured at version",)),
    "weights to the rollout, replay": ("", ()),
}
LIMIT_S = 180.0
POLL_S = 0.05


class Bench:
    """One stack with one job that never ends by itself."""

    def __init__(self, stack: Stack, client: Client) -> None:
        self._stack, self._client = stack, client
        self._state = Path(stack.state_dir)
        self._job = client.submit(_job())

    def measure(self, kind: str) -> dict[str, float]:
        """Kills in mid-step; seconds until the step is applied, and its parts where a trainer was killed."""
        step = self._settled()
        self._until(lambda job: job.progress.step > step or job.progress.phase == "train")
        step = self._now().progress.step
        killed = time.time()
        self._kill(kind)
        self._until(lambda job: job.progress.step > step)
        total = time.time() - killed
        parts = self._parts(killed, total) if kind in ("rank", "agent") else {}
        return {**parts, "total": total}

    def close(self) -> None:
        self._client.cancel(self._job.id)

    def _kill(self, kind: str) -> None:
        agent = psutil.Process(_pid(self._state / "trainers" / f"{self._job.id}.json"))
        names = {"controller": "controller", "rollout": "rollout-0", "reward": "reward-ocr"}
        match kind:
            case "rank":
                random.choice([p for p in agent.children() if "services.trainer" in " ".join(p.cmdline())]).kill()
            case "agent":
                agent.kill()
            case "controller" | "rollout" | "reward":
                os.kill(_pid(self._state / "processes" / f"{names[kind]}.json"), signal.SIGKILL)

    def _settled(self) -> int:
        """After a whole step that was not disturbed."""
        step = self._now().progress.step
        self._until(lambda job: job.progress.step >= step + 2)
        return self._now().progress.step

    def _now(self) -> Job:
        return self._client.job(self._job.id)

    def _until(self, condition: Callable[[Job], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                job = self._now()
                if job.status in ("failed", "succeeded"):
                    raise SystemExit(f"the job {job.status}: {job.reason}")
                if condition(job):
                    return
            except OSError:
                pass  # the controller was killed
            if time.monotonic() > deadline:
                raise SystemExit("the job does not continue: see the controller's log")
            time.sleep(POLL_S)

    def _parts(self, killed: float, total: float) -> dict[str, float]:
        parts, last = {}, killed
        for name, (service, words) in PARTS.items():
            file = "controller" if service == "controller" else f"trainer-{self._job.id}"
            end = _first(self._state / "logs" / f"{file}.log", last, words) if words else killed + total
            parts[name], last = end - last, end
        return parts


def _first(log: Path, after: float, words: tuple[str, ...]) -> float:
    """When a line first said so (Unix seconds)."""
    for text in log.read_text().splitlines():
        if not text.startswith("{"):
            continue
        line: dict[str, Any] = json.loads(text)
        at = datetime.fromisoformat(line["ts"]).timestamp()
        if at >= after - 0.002 and line["msg"].startswith(words):
            return max(at, after)
    return after


def _pid(record: Path) -> int:
    return int(json.loads(record.read_text())["pid"])


def _job() -> dict[str, Any]:
    job = read_job_file(ROOT / "recipes/tiny_ocr.toml")
    job["model"]["path"] = str(ROOT / "recipes/tiny/model")
    job["data"] = {"train": str(ROOT / "recipes/tiny/prompts/train.txt")}
    job["rollout"] |= {"prompts_per_step": 4, "group_size": 6, "batch_size": 12}
    job["trainer"] |= {"world_size": 2, "micro_batch_size": 12, "threads": 1}
    job["schedule"] = {"steps": 10_000, "save_every": 2}
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how long a job stands still after a kill.")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=Path, help="where every measurement goes, appended one JSON object a line")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in options.kinds}
    with tempfile.TemporaryDirectory() as state:
        stack_options = StackOptions(
            state_dir=Path(state), port=0, model=str(ROOT / "recipes/tiny/model"), data_roots=(ROOT,)
        )
        with local_stack(stack_options) as stack, Client(stack.url) as client:
            bench = Bench(stack, client)
            for _ in range(options.times):
                for kind in options.kinds:
                    found[kind].append(bench.measure(kind))
                    print(kind, {name: round(value, 2) for name, value in found[kind][-1].items()}, flush=True)
                    if options.json:
                        with options.json.open("a") as file:
                            file.write(json.dumps({"kind": kind, **found[kind][-1]}) + "\n")
            bench.close()
    print(table(found))


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Medians, one row a kind."""
    columns = [*PARTS, "total"]
    rows = ["| killed | " + " | ".join(columns) + " | longest |", "|---" * (len(columns) + 2) + "|"]
    for kind, measured in found.items():
        cells = [
            f"{statistics.median(values):.1f}" if (values := [one[name] for one in measured if name in one]) else ""
            for name in columns
        ]
        rows.append(f"| {kind} | " + " | ".join(cells) + f" | {max(one['total'] for one in measured):.1f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
