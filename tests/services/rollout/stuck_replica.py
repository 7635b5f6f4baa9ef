"""A replica whose engine does what a file says: `python -m tests.services.rollout.stuck_replica FILE FLAGS…`.

    SECONDS   each batch takes so long before its first denoising step, inside a C function that lets Python continue
    ever      as long as it takes

Loading takes `LOAD_S` besides.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

from services.rollout.__main__ import main
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.engines.sampler import Sampler

order = Path(sys.argv.pop(1))
sample, load = Sampler.sample, DiffusersEngine._load


def stuck_sample(self: Sampler, *given: Any) -> Any:
    text = order.read_text()
    while text == "ever":
        ctypes.CDLL(None).pause()
    time.sleep(float(text))
    return sample(self, *given)


def slow_load(self: DiffusersEngine, model: Any) -> None:
    time.sleep(float(os.environ["LOAD_S"]))
    load(self, model)


Sampler.sample = stuck_sample  # type: ignore[method-assign, assignment]
DiffusersEngine._load = slow_load  # type: ignore[method-assign, assignment]

if __name__ == "__main__":
    sys.exit(main())
