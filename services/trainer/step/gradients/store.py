"""Gradients of a step on disk, next to the job's checkpoints, until one of these covers the step.

A step that is applied again after a kill finds them, and makes the same update bit for bit, whatever the rewards would
answer now. The folder's name is of the step's request and of all before it, so that another history of the job has
another one.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

FOLDER = "gradients"
_NAME = re.compile(r"step-(\d+)-\w+")


@dataclass(frozen=True)
class RowGradient:
    """What rewards said of one row."""

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

    def put(self, row: str, found: RowGradient) -> None:
        """Raises OSError, as on a full disk."""
        path = self._path(row)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        tensors = {
            "gradient": found.gradient.contiguous(),
            "reward": torch.tensor(found.reward, dtype=torch.float64),
            "is_missing": torch.tensor(found.is_missing),
        }
        aside.write_bytes(safetensors.torch.save(tensors))
        aside.replace(path)

    def _path(self, row: str) -> Path:
        return self.directory / FOLDER / f"step-{self.step}-{self.lineage}" / f"{row}.safetensors"


def release(directory: Path, before: int) -> None:
    """Deletes the gradients of steps below `before`."""
    for folder in (directory / FOLDER).glob("step-*"):
        if (match := _NAME.fullmatch(folder.name)) and int(match[1]) < before:
            shutil.rmtree(folder, ignore_errors=True)
