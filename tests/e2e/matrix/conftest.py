"""Stacks in one process, tiny checkpoints and prompt files for the cases of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

import pytest

from flowfleet.client.client import Client
from tests.e2e.conftest import ROOT, Fleet
from tests.e2e.matrix.cases import TEXTS, write_data
from tests.e2e.matrix.texts import make_text
from tests.e2e.one_process import Reward, stack_in_one_process
from tests.tiny_models import make_tiny


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of a kind, made when it is first asked for."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda kind: (make_text if kind in TEXTS else make_tiny)(kind, root / kind))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


FleetMaker = Callable[..., AbstractContextManager[Fleet]]


@pytest.fixture(scope="module")
def make_quick_fleet(redis_of_module: str, tmp_path_factory: pytest.TempPathFactory) -> FleetMaker:
    """A context manager that serves a stack in this process, with these rewards and one rollout of that engine."""

    @contextmanager
    def make(rewards: dict[str, Reward], engine: str = "diffusers") -> Iterator[Fleet]:
        state, roots = tmp_path_factory.mktemp("stack"), (ROOT, tmp_path_factory.getbasetemp())
        with (
            stack_in_one_process(redis_of_module, state, rewards, roots, engine=engine) as stack,
            Client(stack.url) as client,
        ):
            yield Fleet(stack, client)

    return make


@pytest.fixture(scope="module")
def fleet(make_quick_fleet: FleetMaker) -> Iterator[Fleet]:
    with make_quick_fleet({name: (name, {}) for name in ("jpeg_compressibility", "image_quality")}) as running:
        yield running
