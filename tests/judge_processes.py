"""The tiny judge as processes: taught, served over HTTP, and behind a reward service."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from flowfleet.local.ports import free_ports
from recipes.tiny_vlm.teach import RUBRIC

START_S = 300.0
MODEL_NAME = "tiny-vlm"
PATIENCE = {"concurrency": 4, "max_concurrency": 8, "timeout_s": 120, "deadline_s": 600}
"""Settings for one server that computes one answer at a time, on a CPU that others use too."""
PREFIX = "flowfleet_reward_judge_"


@dataclass(frozen=True)
class JudgeService:
    """`address` is host:port of its gRPC; `metrics_port` is on loopback too."""

    address: str
    metrics_port: int

    def counters(self) -> dict[str, float]:
        """The judge's counters so far, without their prefix, by outcome where they have one: `cache/hit`, `retries`."""
        page = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", trust_env=False).text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name.startswith(PREFIX) and sample.name.endswith("_total"):
                    name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                    label = sample.labels.get("outcome") or sample.labels.get("kind")
                    key = f"{name}/{label}" if label else name
                    found[key] = found.get(key, 0.0) + sample.value
        return found


def teach(output: Path, steps: int) -> None:
    """Leaves a checkpoint in `output`; one that is there is kept."""
    if not (output / "config.json").exists():
        argv = [sys.executable, "-m", "recipes.tiny_vlm.teach", "--output", str(output), "--steps", str(steps)]
        subprocess.run(argv, check=True)


@contextmanager
def judge_service(checkpoint: Path, folder: Path, busy_every: int = 0) -> Iterator[JudgeService]:
    """The checkpoint behind its HTTP server, and the reward service that asks it; both end with the block.

    busy_every: of so many requests the server turns one away with a 503; 0: none. Raises RuntimeError, with the end of
    its log, for a process that does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    server = ["recipes.tiny_vlm.server", "--model", str(checkpoint), "--served-model-name", MODEL_NAME]
    with _process(folder, "server", [*server, "--busy-every", str(busy_every)]) as host:
        (metrics_port,) = free_ports(1)
        settings = {"rubric": RUBRIC, "model": MODEL_NAME, "urls": f"http://{host}/v1", **PATIENCE}
        changes = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        argv = ["services.reward", "--scorer", "vlm", *changes, "--metrics-port", str(metrics_port)]
        with _process(folder, "judge", argv) as address:
            yield JudgeService(address, metrics_port)


@contextmanager
def _process(folder: Path, name: str, argv: list[str]) -> Iterator[str]:
    """The address in the port file of `python -m argv…`, which is ended with the block."""
    port_file, log = folder / f"{name}.port", folder / f"{name}.log"
    port_file.unlink(missing_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *argv, "--port-file", str(port_file)], stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + START_S
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start; the end of {log}:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield port_file.read_text().strip()
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
