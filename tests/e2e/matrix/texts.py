"""Tiny checkpoints of models that write text."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from recipes.tiny_thinker.model import save_random
from tests.tiny_models import make_tiny
from tests.tiny_models.text import save_text_model


def make_text(kind: str, path: Path) -> Path:
    """Writes a checkpoint of a kind in `cases.TEXTS`."""
    if kind == "bagel":
        return make_tiny(kind, path)
    if kind in ("qwen3", "qwen3_moe"):
        return save_text_model(path, "experts" if kind == "qwen3_moe" else "dense")
    save_random(path)
    return path if kind == "thinker" else as_whole(path)


def as_whole(path: Path) -> Path:
    """Turns a Thinker's folder into that of a whole Qwen3-Omni without its talker."""
    weights = path / "model.safetensors"
    save_file({f"thinker.{name}": value for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    config = path / "config.json"
    whole = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "thinker_config": json.loads(config.read_text()),
    }
    config.write_text(json.dumps(whole))
    return path
