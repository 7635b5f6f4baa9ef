"""Address of a reward to try: of a running service, or of one that is started for the trial."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from flowfleet.local.rewards import Reward, parse_reward
from flowfleet.rpc.kinds import without_own

POLL_S: Final = 0.05
STOP_S: Final = 10.0
TAIL: Final = 8
"""Lines of a service's log that are shown when it does not start."""


def parse_tried(text: str) -> Reward:
    """Parses a reward as `up --reward` does, but a function or an address needs no name. Raises ValueError."""
    if "://" in text:
        return Reward("reward", address=text)
    try:
        return parse_reward(text)
    except ValueError:
        return parse_reward(f"reward={text}")


@contextlib.contextmanager
def serving(reward: Reward, start_timeout_s: float) -> Iterator[str]:
    """The address of the reward. Starts `services.reward` where it does not run, as `flowfleet up` does, and ends it.

    Raises ValueError with the service's last lines when it does not start."""
    if reward.address is not None:
        yield reward.address
        return
    with tempfile.TemporaryDirectory(prefix="flowfleet-reward-") as folder:
        port_file, log = Path(folder) / "port", Path(folder) / "log"
        argv = [sys.executable, "-m", "services.reward", "--scorer", str(reward.scorer), "--port-file", str(port_file)]
        for setting in reward.settings:
            argv += ["--set", setting]
        with log.open("wb") as file:
            environment = {**without_own(os.environ), "PYTHONSAFEPATH": "1"}
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment
            )
        try:
            yield _address(process, port_file, log, start_timeout_s)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], port_file: Path, log: Path, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        if port_file.exists():
            return port_file.read_text(encoding="utf-8").strip()
        time.sleep(POLL_S)
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:])
    what = f"is not ready after {timeout_s:g} s" if process.poll() is None else "did not start"
    raise ValueError(f"the reward service {what}:\n{tail}")
