"""Which files a path holds that a LoRA job can start from (`model.adapter`). Free of torch: the controller asks too."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowfleet.job.model_files import FOLDER
from flowfleet.models.weight_files import read_header

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
CHECKPOINT_FILE = "state.json"
PREFIXES = {"diffusers": "transformer.", "peft": "base_model.model."}
"""Beginning of a tensor's name, by layout."""
_METADATA = "lora_adapter_metadata"
_FACTORS = (".lora_A.weight", ".lora_B.weight")
_OTHER_NAMES = ("lora_unet_", ".lora_down.", ".lora_up.", ".lora.down.", ".lora.up.", ".alpha")
"""Names of factors by other trainers, which diffusers converts."""
_STARTS = (True, "gaussian", "orthogonal", "eva")
"""PEFT's `init_lora_weights` that leave the base as it is."""
_WITHOUT_EFFECT = frozenset(
    "auto_mapping base_model_name_or_path corda_config eva_config exclude_modules inference_mode layers_pattern "  # noqa: SIM905
    "layers_to_transform loftq_config lora_alpha lora_dropout lora_ga_config megatron_core peft_version "
    "qalora_group_size r revision runtime_config target_modules task_type".split()
)
"""Settings of PEFT that the tensors tell, that matter in training alone, or only with another one that is refused."""
_USUAL: dict[str, tuple[Any, ...]] = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": _STARTS}

Layout = Literal["diffusers", "peft", "checkpoint"]
"""diffusers: what jobs export and `save_lora_weights` writes. peft: what `PeftModel.save_pretrained` writes.
checkpoint: `checkpoints/step-N` of a job."""
_RENAME = "load it into a pipeline with diffusers, write it with save_lora_weights and give that"
_MERGE: dict[Layout, str] = {
    "diffusers": (
        "merge it (load_lora_weights and fuse_lora of the diffusers pipeline, then unload_lora_weights and "
        "save_pretrained) and give that folder as model.path"
    ),
    "peft": (
        "merge it (PeftModel.from_pretrained(TRANSFORMER, FOLDER).merge_and_unload() of PEFT, then save_pretrained of "
        "the pipeline or model with it) and give that folder as model.path"
    ),
}


@dataclass(frozen=True)
class AdapterFiles:
    layout: Layout
    path: Path
    """The file of the first transformer, or the checkpoint's folder."""

    def of_component(self, component: str, number: int) -> Path:
        """File of the transformer with that number; the second's is next to the first's."""
        return self.path if number == 0 else self.path.with_name(f"{self.path.stem}_{component}.safetensors")


def find_adapter(path: Path) -> AdapterFiles:
    """Resolves `model.adapter`: a folder, or the adapter's file in it.

    Raises:
        ValueError: there is nothing, nothing of a known layout, or an adapter that is not base + B·A.
    """
    if path.is_file() and path.suffix == ".safetensors":
        is_peft = path.with_name(PEFT_CONFIG).is_file() and not path.stem.startswith(Path(DIFFUSERS_FILE).stem)
        return _checked("peft" if is_peft else "diffusers", path)
    if (path / CHECKPOINT_FILE).is_file():
        return AdapterFiles("checkpoint", path)
    if (path / DIFFUSERS_FILE).is_file():
        return _checked("diffusers", path / DIFFUSERS_FILE)
    if (path / PEFT_FILE).is_file():
        return _checked("peft", path / PEFT_FILE)
    found = "is not there" if not path.exists() else "holds no adapter"
    raise ValueError(
        f"{path} {found}: give a folder with {DIFFUSERS_FILE} or {PEFT_FILE}, such a file, or a checkpoint's folder "
        "(checkpoints/step-00000012)"
    )


def peft_settings(file: Path, layout: Layout) -> dict[str, Any]:
    """PEFT's settings of an adapter's file; empty in a file of diffusers' that is without. Raises ValueError where they
    cannot be read."""
    try:
        if layout == "peft":
            stored = json.loads(file.with_name(PEFT_CONFIG).read_text(encoding="utf-8"))
        else:
            stored = json.loads(read_header(file).get("__metadata__", {}).get(_METADATA, "{}"))
            stored = {name.rpartition(".")[2]: value for name, value in stored.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"the settings of {file} cannot be read: {error}; give a complete adapter") from None
    if not isinstance(stored, dict):
        raise ValueError(f"the settings of {file} cannot be read: they are not an object; give a complete adapter")
    return stored


def _checked(layout: Layout, file: Path) -> AdapterFiles:
    """Raises ValueError for an adapter that is not alpha / rank · B·A on top of the base as it is."""
    for path in (file, *sorted(file.parent.glob(f"{file.stem}_*.safetensors"))):
        for name, value in peft_settings(path, layout).items():
            if name not in _WITHOUT_EFFECT and value and value not in _USUAL.get(name, ()):
                raise ValueError(f"{path} has {name} = {json.dumps(value)}, so it is not base + B·A: {_MERGE[layout]}")
        keys = (key for key in read_header(path) if key != "__metadata__")
        if other := [key for key in keys if not (key.startswith(PREFIXES[layout]) and key.endswith(_FACTORS))]:
            is_named = all(any(part in key for part in _OTHER_NAMES) for key in other)
            raise ValueError(
                f"{path} holds {other[0]}, which is not named as diffusers or PEFT name a factor of LoRA on the "
                f"transformer: {_RENAME if is_named else _MERGE[layout]}"
            )
    return AdapterFiles(layout, file)


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
