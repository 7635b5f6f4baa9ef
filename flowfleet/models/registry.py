"""Which model families there are, by the `_class_name` of a checkpoint's `model_index.json`. Free of torch.

A new family is one file with a `ModelAdapter` and one `register` here, or in a plugin (flowfleet/plugins.py). Adapters
are imported when they are first asked for, because diffusers takes seconds.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flowfleet import hub, plugins

if TYPE_CHECKING:
    from flowfleet.models.base import ModelAdapter


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """What a job may ask of a family."""

    pipeline: str
    """diffusers' pipeline class."""
    title: str
    """Common name of the model."""
    adapter: str
    """"module:class" of the `ModelAdapter`."""
    modality: Literal["image", "video"] = "image"
    takes_images: bool = False
    """Prompts come with condition images."""
    embedded_guidance: bool = False
    """Guidance is an input of the transformer: `rollout.embedded_guidance` has an effect."""
    max_sequence_length: int | None = None
    """The greatest `model.max_sequence_length`; None: prompts keep their own length, and it has no effect."""
    frame_multiple: int = 1
    """Frames that a latent frame stands for: `rollout.num_frames` is 1 more than a multiple of it."""
    vae_multiple: int | None = None
    """Where pixels per latent pixel differ between checkpoints: height and width are multiples of this many times the
    `scale_factor_spatial` in the VAE's configuration. None leaves it to the adapter."""

    def load(self) -> type[ModelAdapter]:
        """Imports the adapter class; needs torch and diffusers."""
        module, name = self.adapter.split(":")
        adapter: type[ModelAdapter] = getattr(importlib.import_module(module), name)
        return adapter


FAMILIES: dict[str, ModelFamily] = {}
"""Families by pipeline class."""


def register(family: ModelFamily) -> None:
    """Raises ValueError if the pipeline class has a family already."""
    if family.pipeline in FAMILIES:
        raise ValueError(f"{family.pipeline} is registered already, as {FAMILIES[family.pipeline].title}")
    FAMILIES[family.pipeline] = family


for _family in (
    ModelFamily("QwenImagePipeline", "Qwen-Image", "flowfleet.models.families.qwen_image:QwenImageAdapter"),
    ModelFamily(
        "StableDiffusion3Pipeline",
        "Stable Diffusion 3",
        "flowfleet.models.families.stable_diffusion_3:StableDiffusion3Adapter",
        max_sequence_length=512,
    ),
    ModelFamily(
        "FluxPipeline",
        "FLUX.1",
        "flowfleet.models.families.flux:FluxAdapter",
        embedded_guidance=True,
        max_sequence_length=512,
    ),
    ModelFamily("ChromaPipeline", "Chroma", "flowfleet.models.families.chroma:ChromaAdapter", max_sequence_length=512),
    ModelFamily(
        "ZImagePipeline", "Z-Image", "flowfleet.models.families.z_image:ZImageAdapter", max_sequence_length=512
    ),
    ModelFamily(
        "QwenImageEditPlusPipeline",
        "Qwen-Image-Edit-Plus",
        "flowfleet.models.families.qwen_image_edit:QwenImageEditAdapter",
        takes_images=True,
    ),
    ModelFamily(
        "WanPipeline",
        "Wan",
        "flowfleet.models.families.wan:WanAdapter",
        modality="video",
        max_sequence_length=512,
        frame_multiple=4,
        vae_multiple=2,
    ),
):
    register(_family)


def family_of(path: str | Path) -> ModelFamily:
    """The family of the diffusers checkpoint folder `path`, or of a name of the Hub; of plugins too.

    Raises:
        ValueError: no such folder, no readable `model_index.json` in it, or a pipeline class that is not supported.
    """
    plugins.load()
    name = _pipeline_class(hub.configurations(path))
    if name not in FAMILIES:
        raise ValueError(f"model {path} is a {name}, which is not supported: use one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def adapter_for(path: str | Path) -> type[ModelAdapter]:
    """The adapter class for a checkpoint folder; see `family_of`."""
    return family_of(path).load()


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
