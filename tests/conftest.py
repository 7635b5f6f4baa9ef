"""Fixtures shared by all tests. Heavy imports stay inside the fixtures, so that torch-free tests start fast."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from flowfleet.process.service import PATIENT_THREADS
from tests import forks

# Before torch: three files of tests at a time share two cores. Threads that meet at barriers wait for one that has no
# core: with two a process, steps of the tiny model took four times as long next to one other process.
os.environ.update(PATIENT_THREADS | {"OMP_NUM_THREADS": "1"})

pytest_plugins = ("tests.fast",)

# A time says more of the machine than of what is tested.
settings.register_profile("flowfleet", deadline=None)
settings.load_profile("flowfleet")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says once a reason how many tests were skipped for it; reasons say what to install."""
    skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} skipped:")
        for reason, number in Counter(reason.removeprefix("Skipped: ") for reason in skipped).most_common():
            terminalreporter.write_line(f"{number:7}  {reason}")


def pytest_collection_finish() -> None:
    forks.ENVIRON.update(os.environ)


class EventLoop(asyncio.SelectorEventLoop):
    """Says nothing of what grpc hands to the closed loop of an earlier test: anyio would blame the test of now."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        late = "PollerCompletionQueue" in repr(context.get("handle")) and "loop is closed" in str(
            context.get("exception")
        )
        if not late:
            super().call_exception_handler(context)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": EventLoop}


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """Takes back the variables that a file's tests set in this process: services fork only under those that the fork
    server began with, and start by exec, several seconds slower, under others."""
    before = dict(os.environ)
    yield
    for name in (os.environ.keys() | before.keys()) - {"PYTEST_CURRENT_TEST"}:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile without what earlier tests compiled and counted."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def tiny_qwen_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny `QwenImagePipeline` checkpoint folder (fp32), made once a test session; read only."""
    from tests.tiny_models.qwen_image import make_tiny_qwen_image

    return make_tiny_qwen_image(tmp_path_factory.mktemp("models") / "tiny-qwen-image")


@pytest.fixture(scope="session")
def _redis_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from flowfleet.redis.server import RedisServer

    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server.start()
    server.stop()


@pytest.fixture
def redis_url(_redis_of_session: str) -> str:
    """A real, empty Redis with a password, as `flowfleet up` starts it; one server a test session."""
    return _emptied(_redis_of_session)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Any]:
    """A client of that Redis."""
    from flowfleet.redis.client import connect

    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture(scope="module")
def redis_of_module(_redis_of_session: str) -> str:
    """The same server, emptied before the first test of a file alone: for services that live as long as its tests."""
    return _emptied(_redis_of_session)


def _emptied(url: str) -> str:
    from flowfleet.redis.client import connect_sync

    with connect_sync(url) as client:
        client.flushall()
    return url
