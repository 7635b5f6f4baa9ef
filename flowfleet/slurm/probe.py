"""`python -m flowfleet.slurm.probe FILE PORTS HOST…`: what a node says of itself, as one line of JSON.

It reads the word in FILE, resolves the hosts, and names free ports. The random order is the same on all nodes, so that
their free ports have many in common.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import time
from pathlib import Path

from flowfleet.local.ports import FIRST_PORT, LAST_PORT, is_free
from flowfleet.process.service import usable_cpus


def main(file: str, num_ports: str, *hosts: str) -> None:
    word = ""
    with contextlib.suppress(OSError):
        word = Path(file).read_text()
    addresses = {}
    for host in hosts:
        with contextlib.suppress(OSError):
            addresses[host] = socket.gethostbyname(host)
    candidates = random.Random(file + os.environ["SLURM_JOB_ID"]).sample(
        range(FIRST_PORT, LAST_PORT), 50 + 4 * int(num_ports)
    )
    answer = {
        "node": os.environ["SLURMD_NODENAME"],
        "word": word,
        "time": time.time(),
        "gpus": int(os.environ.get("SLURM_GPUS_ON_NODE") or 0),
        "cpus": usable_cpus(),
        "addresses": addresses,
        "ports": [port for port in candidates if is_free(port, "0.0.0.0")],
    }
    sys.stdout.write(json.dumps(answer) + "\n")  # in one piece: srun mixes the lines of nodes, not their parts


if __name__ == "__main__":
    main(*sys.argv[1:])
