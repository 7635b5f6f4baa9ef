"""Asks /healthz all the time, from a process of its own, as a kubelet does.

python -m bench.scale.probe PORT_FILE NOTES_FILE
"""

from __future__ import annotations

import http.client
import json
import signal
import sys
import time
from pathlib import Path

EVERY_S = 0.05
TIMEOUT_S = 30.0


def ask(address: str) -> float | None:
    """Seconds to the answer; None where there is none."""
    host, _, port = address.rpartition(":")
    began = time.monotonic()
    connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        answered = connection.getresponse().status == 200
    except OSError:
        return None
    finally:
        connection.close()
    return time.monotonic() - began if answered else None


def main() -> None:
    port_file, notes_file = Path(sys.argv[1]), Path(sys.argv[2])
    rows: list[tuple[float, float | None]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        while True:
            if port_file.exists():
                rows.append((time.time(), ask(port_file.read_text())))
            time.sleep(EVERY_S)
    finally:
        notes_file.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
