"""Interface of the part that runs jobs, for the REST API. The two meet here and in the store, nowhere else."""

from collections.abc import Callable, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from services.controller.fleet.directory import Directory
from services.controller.fleet.replicas import Replica
from services.controller.platforms.launcher import Launcher
from services.controller.settings import ControllerSettings
from services.controller.store.store import Store


class Scheduler(Protocol):
    async def start(self) -> None:
        """Takes up every job of `store.jobs.active()` when this controller leads; returns once it watches, not once
        they ended."""

    async def stop(self) -> None:
        """Leaves the jobs as they are, for the next controller to take up."""

    async def notify(self) -> None:
        """A job was submitted, or a wish of its record changed; whichever controller leads hears it. Returns at once.
        It polls too, so nothing is lost."""

    @property
    def alive(self) -> bool:
        """Its tasks run."""

    @property
    def leads(self) -> bool:
        """It runs jobs; of several controllers one does."""

    @property
    def trouble(self) -> str:
        """Why Redis rejects writes or no controller may lead, which stops all jobs; empty while jobs run."""

    @property
    def loss(self) -> str:
        """Writes that Redis lost, while no controller may lead because of it; empty if it lost none."""

    def fleet_view(self) -> Sequence[Replica]:
        """The rollout replicas known now."""


SchedulerFactory = Callable[[ControllerSettings, Redis, Store, CollectorRegistry, Launcher, Directory], Scheduler]
"""The runner's own metrics go into the registry, which `/metrics` shows."""
