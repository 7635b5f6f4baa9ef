"""Description of an exported model: `flowfleet.json` next to its weights, written last.

It lists every file with its size and CRC-32, so that a copy can be checked wherever it went.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

MANIFEST = "flowfleet.json"
CARD = "README.md"
FOLDER = "model"
"""Folder of the model, inside a checkpoint and inside the folder of a job."""
GRADIENTS = "gradients"
"""Folder of the gradients of rewards that a trainer keeps, next to a job's checkpoints."""
_CHECKPOINT = re.compile(r"step-(\d{8,})")

Weights = Literal["trained", "average", "old policy"]
Kind = Literal["adapter", "pipeline"]


class ModelFile(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)

    size_bytes: int
    crc32: str
    """Eight hex digits."""


class ModelManifest(BaseModel):
    """An exported model."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    job_id: str
    step: int
    """Training steps in its weights."""
    kind: Kind
    """adapter: LoRA factors. pipeline: a whole diffusers pipeline."""
    weights: Weights
    """trained: as the optimizer left them. average: their moving average (`trainer.ema`). old policy: the policy that
    sampled for the loss."""
    base_model: str
    """The pipeline that training started from."""
    dtype: str
    files: dict[str, ModelFile]
    """Path inside the folder → file; without this manifest itself."""


def read_manifest(folder: Path) -> ModelManifest:
    """The manifest of an exported model. Raises ValueError where there is none that can be read."""
    try:
        return ModelManifest.model_validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no exported model: it has no {MANIFEST}") from None
    except (OSError, ValidationError) as error:
        raise ValueError(f"{folder / MANIFEST} cannot be read: {error}") from None


def check_name(name: str) -> PurePosixPath:
    """A file's path inside a model's folder. Raises ValueError for one that would lead out of it."""
    path = PurePosixPath(name)
    is_plain = name == str(path) and not path.is_absolute() and "\\" not in name and name.isprintable()
    if not is_plain or any(part in ("", ".", "..") or ":" in part for part in path.parts) or not path.parts:
        raise ValueError(f"{name!r} is not a plain path inside a model's folder")
    return path


def exported_folder(checkpoint: Path) -> Path:
    """The model in a checkpoint, in the weights and the data type that its users load; else the folder itself."""
    return checkpoint / FOLDER if (checkpoint / FOLDER / MANIFEST).is_file() else checkpoint


def model_folder(job: Path, step: int | None = None) -> Path | None:
    """The folder of a job's model: of its checkpoint of a `step`; else the one that was trained longest, at the same
    step what the job exported at its end. None where there is none."""
    checkpoints = job / "checkpoints"
    if step is not None:
        folder = checkpoints / f"step-{step:08d}" / FOLDER
        return folder if (folder / MANIFEST).is_file() else None
    found = checkpoints.iterdir() if checkpoints.is_dir() else ()
    steps = [(int(match[1]), False, path / FOLDER) for path in found if (match := _CHECKPOINT.fullmatch(path.name))]
    steps = [one for one in steps if (one[2] / MANIFEST).is_file()]
    if (job / FOLDER / MANIFEST).is_file():
        steps.append((read_manifest(job / FOLDER).step, True, job / FOLDER))
    return max(steps)[2] if steps else None
