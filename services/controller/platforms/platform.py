"""Where the fleet runs. Each platform has a folder, which opens it: its directory of rewards and pools, its launcher of
trainers with their allocation, and how its pools shrink."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from services.controller.fleet.directory import Directory
from services.controller.platforms.launcher import Launcher

if TYPE_CHECKING:
    from services.controller.settings import ControllerSettings

SetCost = Callable[[str, int], Awaitable[None]]
"""Tells a pod, by name, its deletion cost."""


@dataclass(frozen=True)
class Platform:
    directory: Directory
    launcher: Launcher
    set_deletion_cost: SetCost | None = None
    """Sets the deletion cost of a rollout's pod; None if pools are not scaled in."""


def open_platform(settings: ControllerSettings, registry: CollectorRegistry) -> Platform:
    """Start its directory before use, and stop it in the end. Raises ValueError for what cannot work.

    A platform is imported only where it is used: the client of Kubernetes is large.
    """
    if settings.kubernetes:
        from services.controller.platforms.kubernetes.platform import open_kubernetes

        return open_kubernetes(settings, registry)
    if settings.slurm is not None:
        from services.controller.platforms.slurm.platform import open_slurm

        return open_slurm(settings, settings.slurm)
    from services.controller.platforms.local.platform import open_local

    return open_local(settings)
