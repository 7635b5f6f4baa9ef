"""The controller's app with a runner that runs nothing, and jobs that it takes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from redis.asyncio import Redis

from flowfleet.api.fleet import Health
from services.controller.api.dependencies import Services
from services.controller.app import create_app
from services.controller.fleet.directory import Directory
from services.controller.fleet.replicas import Replica
from services.controller.platforms.launcher import Launcher
from services.controller.rewards import trials as reward_trials
from services.controller.settings import ControllerSettings
from services.controller.store.store import Store


class IdleRunner:
    """Counts its calls."""

    def __init__(
        self,
        settings: ControllerSettings,
        redis: Redis,
        store: Store,
        registry: CollectorRegistry,
        launcher: Launcher,
        directory: Directory,
    ) -> None:
        self.alive = False
        self.leads = True
        self.notified = 0
        self.trouble = self.loss = ""

    async def start(self) -> None:
        self.alive = True

    async def stop(self) -> None:
        self.alive = False

    async def notify(self) -> None:
        self.notified += 1

    def fleet_view(self) -> list[Replica]:
        place = Replica("rollout-0", "127.0.0.1:7000", "default", "i1", Health.SERVING, "job", 3, digest="d")
        return [replace(place, outstanding=4, samples_total=5, device="cpu")]


@dataclass
class Api:
    client: httpx.AsyncClient
    app: FastAPI

    @property
    def services(self) -> Services:
        found = self.app.state.services
        assert isinstance(found, Services)
        return found

    @property
    def store(self) -> Store:
        return self.services.store

    async def submit(self, job: dict[str, Any], **headers: str) -> dict[str, Any]:
        response = await self.client.post("/v1/jobs", json=job, headers=headers)
        assert response.status_code == 202, response.text
        record: dict[str, Any] = response.json()
        return record


@asynccontextmanager
async def serve(settings: ControllerSettings) -> AsyncIterator[Api]:
    app = create_app(settings, IdleRunner)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client:
            yield Api(client, app)


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> ControllerSettings:
    rewards = {"ocr": "127.0.0.1:7001", "jpeg": "127.0.0.1:7002"}
    return ControllerSettings(
        redis_url=SecretStr(redis_url),
        state_dir=tmp_path / "state",
        data_roots=(tmp_path,),
        data_urls=("s3://bucket",),
        rewards=rewards,
    )


@pytest.fixture
async def api(settings: ControllerSettings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    """Its rewards are addresses without a server: a submit waits for them only shortly."""
    monkeypatch.setattr(reward_trials, "TRIAL_S", 0.05)
    async with serve(settings) as api:
        yield api


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Makes a job whose files exist; top-level parts can be replaced."""
    model, prompts = tmp_path / "model", tmp_path / "prompts.txt"
    model.mkdir(exist_ok=True)
    (model / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    prompts.write_text('A red sign that says "K7QX"\n')
    base = {"model": {"path": str(model)}, "rewards": {"ocr": {}}, "data": {"train": str(prompts)}}
    return lambda **parts: {**base, **parts}
