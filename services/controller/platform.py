"""Where the fleet runs, from the settings: processes of this machine, or pods of a Helm release."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from services.controller.directory import Directory, StaticDirectory
from services.controller.launcher import Launcher, LocalLauncher
from services.controller.settings import ControllerSettings


@dataclass(frozen=True)
class Platform:
    directory: Directory
    launcher: Launcher


def open_platform(settings: ControllerSettings, registry: CollectorRegistry) -> Platform:
    """Start its directory before use, and stop it in the end. Raises ValueError for what cannot work."""
    return Platform(
        StaticDirectory(settings.rewards),
        LocalLauncher(settings.state_dir, settings.trainer_python, settings.trainer_devices),
    )
