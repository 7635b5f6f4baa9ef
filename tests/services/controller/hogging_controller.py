"""`python -m tests.services.controller.hogging_controller FLAGS`: as scripted_controller, but the driver of a job named
"hog" never gives the event loop back while the file HOG is there."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from services.controller.__main__ import main
from services.controller.job import step
from services.controller.jobs import quarantine
from tests.services.controller.scripted_controller import runner

quarantine.MARK_S, quarantine.END_S = 0.5, 2.0
ensure_trainer = step.ensure_trainer  # type: ignore[attr-defined]


def hold(job: Any) -> Any:
    while job.spec.name == "hog" and os.path.exists(os.environ["FLOWFLEET_HOG"]):
        time.sleep(0.01)
    return ensure_trainer(job)


if __name__ == "__main__":
    step.ensure_trainer = hold  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[1:], runner))
