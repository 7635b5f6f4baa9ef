"""The controller as it is, whose jobs find their trainers among the simulated ones. It notes its event loop's lag.

python -m bench.scale.controller LOAD_JSON LAG_FILE FLAGS…
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from bench.scale.load import Load
from flowfleet.job.spec import JobSpec
from flowfleet.process import service
from services.controller.__main__ import main as controller_main
from services.controller.jobs.scheduler import JobScheduler
from services.controller.settings import ControllerSettings
from services.controller.store.store import Store
from tests.services.controller.scripted import ScriptedLauncher

BEAT_S = 0.05


class SimulatedLauncher(ScriptedLauncher):
    """The trainer of a job's pool is always there."""

    def __init__(self, load: Load) -> None:
        super().__init__("", places=load.jobs)
        self._load = load

    async def ensure(self, job_id: str, spec: JobSpec) -> str:
        return self._load.trainer_address(int(spec.rollout.pool.rpartition("-")[2]))


async def note_lag(rows: list[tuple[float, float]]) -> None:
    """Adds Unix seconds and seconds late of each beat."""
    while True:
        due = time.monotonic() + BEAT_S
        await asyncio.sleep(BEAT_S)
        rows.append((time.time(), time.monotonic() - due))


def main() -> int:
    service.end_with_parent()
    load, lag_file = Load(**json.loads(sys.argv[1])), Path(sys.argv[2])
    lag: list[tuple[float, float]] = []
    tasks: list[asyncio.Task[None]] = []

    def make(
        settings: ControllerSettings, redis: Redis, store: Store, registry: Any, launcher: Any, directory: Any
    ) -> JobScheduler:
        tasks.append(asyncio.get_running_loop().create_task(note_lag(lag)))
        return JobScheduler(settings, redis, store, registry, SimulatedLauncher(load), directory)

    code = controller_main(sys.argv[3:], make)
    lag_file.write_text(json.dumps(lag))
    return code


if __name__ == "__main__":
    sys.exit(main())
