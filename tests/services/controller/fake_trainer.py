"""What `flowfleet.process.forkserver` runs in tests: a rank that serves no calls and has a child process."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flowfleet.local.files import write_atomically


def main(argv: Sequence[str]) -> None:
    if "--fail" in argv:
        raise SystemExit(argv[-1])
    port_file = argv[argv.index("--port-file") + 1]
    rank = os.environ["RANK"]
    Path(f"{port_file}.rank{rank}").write_text(str(os.getpid()))
    if rank == "0":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        Path(f"{port_file}.child").write_text(str(child.pid))
        Path(f"{port_file}.devices").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"))
        Path(f"{port_file}.world").write_text(os.environ["WORLD_SIZE"])
        write_atomically(Path(port_file), "127.0.0.1:4711")
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1:])
