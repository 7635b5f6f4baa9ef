"""This machine as a platform."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.controller.platforms.local.directory import StaticDirectory
from services.controller.platforms.local.launcher import LocalLauncher
from services.controller.platforms.platform import Platform

if TYPE_CHECKING:
    from services.controller.settings import ControllerSettings


def open_local(settings: ControllerSettings) -> Platform:
    return Platform(
        StaticDirectory(settings.rewards, settings.rewards_file),
        LocalLauncher(settings.state_dir, settings.trainer_python, settings.trainer_devices, settings.trainers),
    )
