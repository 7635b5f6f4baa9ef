"""A running reward service, in this process for scorers of a test, or as `python -m services.reward`."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from flowfleet.process.started import StartedProcess
from tests.forks import start

START_S = 120.0
"""Time for a service to start: importing torch takes long on a busy machine."""


@dataclass
class ServiceProcess:
    """`address` is host:port of gRPC; `log` the file that its stderr goes to."""

    process: StartedProcess
    address: str
    log: Path

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric whose labels include the given ones; 0 when there is none."""
        found = re.search(r"http://[^/]+/metrics", self.log.read_text())
        assert found is not None
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        rows = re.findall(rf"^{name}\{{(.*?)\}} (\S+)$", httpx.get(found[0], trust_env=False).text, re.MULTILINE)
        return sum(float(value) for row, value in rows if wanted <= set(row.split(",")))


@contextmanager
def reward_process(folder: Path, *flags: str) -> Iterator[ServiceProcess]:
    """Starts a service with `flags` and waits until it answers; kills it at the end."""
    port_file, log = folder / "port", folder / "log"
    argv = [sys.executable, "-m", "services.reward", "--port-file", str(port_file), "--metrics-port", "0", *flags]
    with log.open("wb") as stderr:
        process = start(argv, env=os.environ, output=2, error=stderr.fileno())
    try:
        deadline = time.monotonic() + START_S
        while not port_file.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the service did not start"
            time.sleep(0.02)
        yield ServiceProcess(process, port_file.read_text(), log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def ocr_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """An `ocr` service on one thread that waits long enough for concurrent calls to share a batch."""
    flags = ("--scorer", "ocr", "--processes", "1", "--threads", "1", "--max-batch", "16", "--max-wait-ms", "200")
    with reward_process(tmp_path_factory.mktemp("ocr"), *flags) as service:
        yield service
