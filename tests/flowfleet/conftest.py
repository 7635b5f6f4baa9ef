"""A controller that answers but runs nothing, as a real process, for tests of the client and the command line."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from flowfleet.local.ports import free_ports
from flowfleet.process.started import StartedProcess
from tests.forks import start


class IdleController:
    """Start, kill and start again on the same port."""

    def __init__(self, redis_url: str, directory: Path, *flags: str) -> None:
        self.redis_url, self._flags = redis_url, flags
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self._root = str(directory.parent)
        self.state_dir = directory / "state"
        self._log = (directory / "controller.log").open("ab")
        self._process: StartedProcess | None = None

    def start(self) -> None:
        flags = ["--port", str(self.port), "--reward", "ocr=a:1", "--data-root", self._root]
        flags += ["--state-dir", str(self.state_dir), *self._flags]
        self._process = start(
            [sys.executable, "-m", "tests.flowfleet.idle_controller", *flags],
            env={**os.environ, "FLOWFLEET_REDIS_URL": self.redis_url},
            output=self._log.fileno(),
        )

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{self.url}/readyz").raise_for_status()
                return
            except httpx.HTTPError:
                time.sleep(0.05)
        raise AssertionError("the controller does not start")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def idle_controller(redis_of_module: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[IdleController]:
    controller = IdleController(redis_of_module, tmp_path_factory.mktemp("controller"))
    controller.start()
    controller.wait()
    yield controller
    controller.kill()


@pytest.fixture
def api_url(idle_controller: IdleController, redis_url: str) -> str:
    """URL of a controller without jobs."""
    return idle_controller.url
