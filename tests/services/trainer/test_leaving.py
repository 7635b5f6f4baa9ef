"""What a trainer saves on a signal, by its weights and its grace."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from services.trainer.leaving import FULL_S, leave


class Runner:
    def __init__(self) -> None:
        self.saved: list[Any] = []

    async def settled(self, grace_s: float) -> bool:
        return True

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        yield

    async def call(self, command: Any) -> Any:
        self.saved.append(command)
        return SimpleNamespace(path="step-00000003")


@pytest.mark.parametrize(
    ("is_lora", "grace_s", "version", "saves"),
    [(True, 10.0, 3, 1), (False, 10.0, 3, 0), (False, FULL_S, 3, 1), (True, 10.0, 2, 0)],
    ids=["adapter", "full, short grace", "full, long grace", "nothing new"],
)
async def test_what_is_saved(is_lora: bool, grace_s: float, version: int, saves: int) -> None:
    job: Any = SimpleNamespace(
        job_id="job",
        record=SimpleNamespace(version=version),
        checkpoints=SimpleNamespace(newest=2, steps=[2]),
        engine=SimpleNamespace(is_lora=is_lora),
    )
    runner: Any = Runner()
    assert await leave(job, runner, grace_s)
    assert len(runner.saved) == saves
