"""Checkpoint folders, looked at without a model: what they hold, and a fingerprint for a scorer's version.

A checkpoint is a folder in the layout of Hugging Face transformers with its weights as safetensors. Pickles (`.bin`,
`.pt`, `.pth`) are never read, and no code that a folder may carry is run. Every error names the setting to change.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator
from safetensors import safe_open

from flowfleet import hub
from flowfleet.job import fingerprints
from flowfleet.job.fingerprints import READ
from flowfleet.models.weight_files import read_header

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
Checkpoint = Annotated[Path, BeforeValidator(lambda given: hub.checkpoint(given) if isinstance(given, str) else given)]
"""A folder, or a model of the Hub by name, which becomes the folder of its commit."""
ALL = ("",)  # suffixes
DIGITS = 12
"""Hexadecimal digits of a fingerprint."""


def check_checkpoint(folder: Path, setting: str, model_types: Collection[str]) -> Mapping[str, Any]:
    """The configuration of a checkpoint of one of these types. ValueError where the folder is none."""
    config = _json(folder, setting, "config.json")
    if config.get("model_type") not in model_types:
        raise ValueError(
            f"settings.{setting} = {str(folder)!r}: its config.json says model_type = {config.get('model_type')!r}, "
            f"this scorer takes {', '.join(sorted(model_types))}"
        )
    if not weight_files(folder):
        raise ValueError(
            f"settings.{setting} = {str(folder)!r} has no *.safetensors: save the model there with save_pretrained, "
            "which writes them; .bin, .pt and .pth files are pickles, which are not read"
        )
    return config


def check_processor(folder: Path, setting: str, *, tokenizer: bool) -> None:
    """ValueError where a folder lacks the image processor or, if asked for, the tokenizer."""
    _need_folder(folder, setting)
    for what, names in (("image processor", PROCESSOR_FILES), ("tokenizer", TOKENIZER_FILES if tokenizer else ())):
        if names and not any((folder / name).is_file() for name in names):
            raise ValueError(
                f"settings.{setting} = {str(folder)!r} has no {what} ({' or '.join(names)}): name the folder of one as "
                "settings.processor, that of the model which this one was trained from, or save it here with "
                "save_pretrained"
            )


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def fingerprint(*paths: Path, read: tuple[str, ...] = READ) -> str:
    """Hexadecimal digits that change with the contents of checkpoints, which may be folders or single files. ValueError
    for weights that were cut."""
    for file in [file for path in paths for file in weight_files(path) or [path]]:
        if file.suffix == ".safetensors":
            read_header(file)
    digests = " ".join(fingerprints.fingerprint(path, read) for path in paths)
    return hashlib.sha256(digests.encode()).hexdigest()[:DIGITS]


def read_scalar(folder: Path, setting: str, name: str) -> float:
    """The only element of a tensor of the checkpoint. ValueError where it has none of that name."""
    for file in weight_files(folder):
        with safe_open(file, "pt") as tensors:
            if name in [*tensors.keys()]:
                return float(tensors.get_tensor(name))
    raise ValueError(
        f"settings.{setting} = {str(folder)!r} has no {name} among its weights: it is another kind of model"
    )


def _json(folder: Path, setting: str, name: str) -> Mapping[str, Any]:
    _need_folder(folder, setting)
    try:
        content = json.loads((folder / name).read_text())
    except FileNotFoundError:
        raise ValueError(
            f"settings.{setting} = {str(folder)!r} has no {name}: name the folder of a checkpoint in the layout of "
            "Hugging Face transformers"
        ) from None
    except ValueError as error:
        raise ValueError(f"settings.{setting} = {str(folder)!r}: {name} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"settings.{setting} = {str(folder)!r}: {name} is no JSON object")
    return content


def _need_folder(folder: Path, setting: str) -> None:
    if not folder.is_dir():
        raise ValueError(
            f"settings.{setting} = {str(folder)!r}: no such folder here. Name one on this machine, or a model of the "
            "Hub as ORG/NAME"
        )
