"""`python -m flowfleet.slurm.step FILE`: the wrapper of one step on one node.

FILE (0600, in the shared folder) holds the command of each node and its secrets, which so appear in no command line
and in none of Slurm's messages. The wrapper shows its process the node's accelerators that are its own, notes the
step's id, and writes how the process ended: `exit.NODE` is the last thing that it does, so a node without one was lost
or its step was killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from flowfleet.hardware.accelerators import VISIBLE
from flowfleet.local.files import read_own, write_atomically

STEP, EXIT = "step", "exit"


def main(file: str) -> int:
    path, node = Path(file), os.environ["SLURMD_NODENAME"]
    spec = json.loads(read_own(path))
    own = spec["nodes"][node]
    write_atomically(path.parent / f"{STEP}.{node}", f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # Slurm signals every process of a step, so the command has it too
    child = subprocess.Popen(own["argv"], env={**os.environ, **spec["env"], **_visible(own["devices"])})
    code = child.wait()
    write_atomically(path.parent / f"{EXIT}.{node}", str(code))
    return code if code >= 0 else 128 - code


def _visible(devices: list[int]) -> dict[str, str]:
    """Environment that shows some of the accelerators that Slurm gave the step, by their place among them."""
    shown = {}
    for variable in VISIBLE.values():
        given = [name for name in os.environ.get(variable, "").split(",") if name]
        if devices and given:
            shown[variable] = ",".join(given[device] for device in devices if device < len(given))
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
