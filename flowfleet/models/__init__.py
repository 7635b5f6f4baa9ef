"""Model adapters: one a family, found by the `_class_name` of a checkpoint's `model_index.json`. Needs torch and
diffusers.

A new family is one file with a `ModelAdapter` and one line in `ADAPTERS`. Adapters are imported when they are first
asked for, because diffusers takes seconds.
"""

import importlib
import json
from pathlib import Path

from flowfleet.models.base import ModelAdapter, PromptEmbeds, Schedule

__all__ = ["ADAPTERS", "ModelAdapter", "PromptEmbeds", "Schedule", "adapter_for"]

ADAPTERS: dict[str, tuple[str, str]] = {
    "QwenImagePipeline": ("flowfleet.models.qwen_image", "QwenImageAdapter"),
}
"""diffusers pipeline class name to the module and class of its adapter."""


def adapter_for(path: str | Path) -> type[ModelAdapter]:
    """The adapter class for the diffusers checkpoint folder `path`.

    Raises:
        ValueError: no such folder, no readable `model_index.json` in it, or a pipeline class that is not supported.
    """
    name = _pipeline_class(Path(path))
    if name not in ADAPTERS:
        raise ValueError(f"model {path} is a {name}, which is not supported: use one of {', '.join(sorted(ADAPTERS))}")
    module, adapter = ADAPTERS[name]
    adapter_class: type[ModelAdapter] = getattr(importlib.import_module(module), adapter)
    return adapter_class


def _pipeline_class(path: Path) -> str:
    index = path / "model_index.json"
    if not path.is_dir():
        raise ValueError(f"model path {path} is not a folder: give the folder of a diffusers checkpoint here")
    if not index.is_file():
        raise ValueError(f"model path {path} has no model_index.json: give the folder of a whole diffusers pipeline")
    try:
        name = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} does not name a pipeline class in _class_name: {error!r}") from error
    return str(name)
