"""Which files a path holds that a LoRA job can start from (`model.adapter`). Free of torch: the controller asks too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowfleet.job.model_files import FOLDER

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
CHECKPOINT_FILE = "state.json"

Layout = Literal["diffusers", "peft", "checkpoint"]
"""diffusers: what jobs export and `save_lora_weights` writes. peft: what `PeftModel.save_pretrained` writes.
checkpoint: `checkpoints/step-N` of a job."""


@dataclass(frozen=True)
class AdapterFiles:
    layout: Layout
    path: Path
    """The file of the first transformer, or the checkpoint's folder."""

    def of_component(self, component: str, number: int) -> Path:
        """File of the transformer with that number; the second's is next to the first's."""
        return self.path if number == 0 else self.path.with_name(f"{self.path.stem}_{component}.safetensors")


def find_adapter(path: Path) -> AdapterFiles:
    """What `model.adapter` names: a folder, or the adapter's file in it.

    Raises:
        ValueError: there is nothing, or nothing of a known layout.
    """
    if path.is_file() and path.suffix == ".safetensors":
        is_peft = path.with_name(PEFT_CONFIG).is_file() and not path.stem.startswith(Path(DIFFUSERS_FILE).stem)
        return AdapterFiles("peft" if is_peft else "diffusers", path)
    if (path / CHECKPOINT_FILE).is_file():
        return AdapterFiles("checkpoint", path)
    if (path / DIFFUSERS_FILE).is_file():
        return AdapterFiles("diffusers", path / DIFFUSERS_FILE)
    if (path / PEFT_FILE).is_file():
        return AdapterFiles("peft", path / PEFT_FILE)
    found = "is not there" if not path.exists() else "holds no adapter"
    raise ValueError(
        f"{path} {found}: give a folder with {DIFFUSERS_FILE} or {PEFT_FILE}, such a file, or a checkpoint's folder "
        "(checkpoints/step-00000012)"
    )


def lora_settings(path: Path) -> dict[str, Any]:
    """Settings of `trainer.lora` that an adapter needs, as the `adapter_config.json` in its folder or checkpoint says;
    empty where there is none."""
    folder = path if path.is_dir() else path.parent
    files = [file for file in (folder / PEFT_CONFIG, folder / FOLDER / PEFT_CONFIG) if file.is_file()]
    if not files:
        return {}
    config = json.loads(files[0].read_text(encoding="utf-8"))
    known = {"rank": config.get("r"), "alpha": config.get("lora_alpha"), "target_modules": config.get("target_modules")}
    return {name: value for name, value in known.items() if isinstance(value, int | float | list)}
