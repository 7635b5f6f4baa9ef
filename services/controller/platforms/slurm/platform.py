"""A Slurm allocation as a platform."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flowfleet.slurm.allocation import read_allocation
from services.controller.platforms.local.directory import StaticDirectory
from services.controller.platforms.platform import Platform
from services.controller.platforms.slurm.launcher import SlurmLauncher

if TYPE_CHECKING:
    from services.controller.settings import ControllerSettings


def open_slurm(settings: ControllerSettings, file: Path) -> Platform:
    """`file`: the allocation, written by `flowfleet up`."""
    launcher = SlurmLauncher(settings.state_dir, read_allocation(file))
    return Platform(StaticDirectory(settings.rewards, settings.rewards_file), launcher)
