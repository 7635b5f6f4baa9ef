"""`python -m tests.services.controller.scripted_controller FLAGS`: the real controller and its real runner, whose jobs
train on the scripted trainer at TRAINER."""

from __future__ import annotations

import os
import sys
from typing import Any

from services.controller.__main__ import main
from services.controller.jobs.scheduler import JobScheduler
from tests.services.controller.scripted import ScriptedLauncher


def runner(settings: Any, redis: Any, store: Any, registry: Any, launcher: Any, directory: Any) -> JobScheduler:
    launched = ScriptedLauncher(os.environ["FLOWFLEET_SCRIPTED_TRAINER"])
    return JobScheduler(settings, redis, store, registry, launched, directory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], runner))
