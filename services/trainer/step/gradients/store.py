"""Gradients of a step on disk, next to the job's checkpoints, until one of these covers the step.

A step that is applied again after a kill finds them, and makes the same update bit for bit, whatever the rewards would
answer now. The folder's name is of the step's request and of all before it, so that another history of the job has
another one.
"""

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from flowfleet.errors import Full, Unavailable
from flowfleet.job.model_files import GRADIENTS

_NAME = re.compile(r"step-(\d+)-\w+")


@dataclass(frozen=True)
class RowGradient:
    """Reward of one row, and its gradient by the latents."""

    gradient: Tensor
    """(*latent) float32 on the CPU: of the wanted rewards' weighted sum, by the clean latents."""
    reward: float
    """The sum itself."""
    is_missing: bool = False
    """A reward has an error for the row: gradient and sum are 0."""


@dataclass(frozen=True)
class GradientStore:
    """Gradients of one step. `directory`: the job's checkpoints'."""

    directory: Path
    step: int
    lineage: str
    """Lineage of the version that the step makes."""

    def get(self, row: str) -> RowGradient | None:
        """None where it is not there, or was not written to its end."""
        try:
            tensors = safetensors.torch.load_file(self._path(row))
            return RowGradient(tensors["gradient"], float(tensors["reward"]), bool(tensors["is_missing"]))
        except (OSError, SafetensorError, KeyError):
            return None

    def put(self, row: str, row_gradient: RowGradient) -> None:
        """Raises Full where the disk has no room, Unavailable where it cannot be written."""
        path = self._path(row)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        tensors = {
            "gradient": row_gradient.gradient.contiguous(),
            "reward": torch.tensor(row_gradient.reward, dtype=torch.float64),
            "is_missing": torch.tensor(row_gradient.is_missing),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(safetensors.torch.save(tensors))
            aside.replace(path)
        except OSError as error:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            subject = f"the gradients of the step's rewards in {path.parent}"
            if error.errno in (ENOSPC, EDQUOT):
                raise Full(f"there is no room for {subject} ({error.strerror}): free some of that disk") from error
            raise Unavailable(f"cannot keep {subject} ({error}): repair that disk, or its permissions") from error

    def _path(self, row: str) -> Path:
        return self.directory / GRADIENTS / f"step-{self.step}-{self.lineage}" / f"{row}.safetensors"


def release(directory: Path, before: int) -> None:
    """Deletes the gradients of steps below `before`."""
    for folder in (directory / GRADIENTS).glob("step-*"):
        if (match := _NAME.fullmatch(folder.name)) and int(match[1]) < before:
            shutil.rmtree(folder, ignore_errors=True)
