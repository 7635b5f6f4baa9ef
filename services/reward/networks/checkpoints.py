"""Checkpoint folders, looked at without a model: what they hold, and a fingerprint for a scorer's version.

A checkpoint is a folder in the layout of Hugging Face transformers with its weights as safetensors. Pickles (`.bin`,
`.pt`, `.pth`) are never read, and no code that a folder may carry is run. Every error names the setting to change.
"""

import hashlib
import json
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator
from safetensors import safe_open

from flowfleet import hub

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
Checkpoint = Annotated[Path, BeforeValidator(lambda given: hub.checkpoint(given) if isinstance(given, str) else given)]
"""A folder, or a model of the Hub by name, which becomes the folder of its commit."""
DIGITS = 12
"""Hexadecimal digits of a fingerprint."""

_BLOCKS, _BLOCK_BYTES = 64, 4096


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


def fingerprint(*paths: Path) -> str:
    """Hexadecimal digits that change with the contents of checkpoints, which may be folders or single files.

    Of a folder the small files that count (`.json`, `.txt`, `.model`) are hashed whole. Of a `.safetensors` file the
    size, the header and 64 evenly spaced blocks of 4 KiB are: training changes every tensor, and so some of them, and
    files of many GB cost milliseconds. A file that differs from another in a few places alone is not told apart.
    """
    digest = hashlib.sha256()
    for path in paths:
        files = [path] if path.is_file() else sorted(child for child in path.iterdir() if child.is_file())
        for file in files:
            if file.suffix in (".json", ".txt", ".model"):
                content = file.read_bytes()
            elif file.suffix == ".safetensors":
                content = _sampled(file)
            else:
                continue
            name = "" if file is path else file.name
            digest.update(f"{name} {file.stat().st_size} ".encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()[:DIGITS]


def read_scalar(folder: Path, setting: str, name: str) -> float:
    """The only element of a tensor of the checkpoint. ValueError where it has none of that name."""
    for file in weight_files(folder):
        with safe_open(file, "pt") as tensors:
            if name in [*tensors.keys()]:
                return float(tensors.get_tensor(name))
    raise ValueError(
        f"settings.{setting} = {str(folder)!r} has no {name} among its weights: it is another kind of model"
    )


def _sampled(file: Path) -> bytes:
    header, start = _header(file)
    return json.dumps(header, sort_keys=True).encode() + blocks(file, start)


def blocks(file: Path, start: int = 0) -> bytes:
    """Evenly spaced blocks of a file from `start` on, one after the other."""
    found = b""
    with file.open("rb") as stream:
        last = max(start, file.stat().st_size - _BLOCK_BYTES)
        for offset in np.linspace(start, last, _BLOCKS).astype(np.int64):
            stream.seek(int(offset))
            found += stream.read(_BLOCK_BYTES)
    return found


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Reads a safetensors file's header, and the offset of its data."""
    with file.open("rb") as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("longer than the file")
            header: dict[str, Any] = json.loads(stream.read(length))
        except (struct.error, ValueError) as error:
            raise ValueError(f"{str(file)!r} is no safetensors file, or was cut: fetch it again ({error})") from None
    return header, 8 + length


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
