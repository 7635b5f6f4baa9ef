"""Which model families there are, by the class that a checkpoint names. Free of torch.

A flow is the folder of a diffusers pipeline and named by `_class_name` in its `model_index.json`. A policy that writes
text is a folder of transformers and named by the first of `architectures` in its `config.json`; so is a flow, or a
model that paints and writes, in a layout of its own. A new family is one file with a `ModelAdapter` or
`SequenceAdapter`, and a table of families.toml or, of a plugin (flowfleet/plugins.py), one `register`. Adapters are
imported when they are first asked for, because diffusers takes seconds.
"""

from __future__ import annotations

import difflib
import importlib
import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from flowfleet import hub, plugins
from flowfleet.models.weight_files import BAGEL, FLAT, PIPELINE, TRANSFORMERS, Layout, check_model

if TYPE_CHECKING:
    from flowfleet.models.base import ModelAdapter
    from flowfleet.models.sequences.adapter import SequenceAdapter

Engine = Literal["diffusers", "transformers", "vllm", "vllm-omni"]
"""Engine that samples a family in rollouts."""
ENGINES: Final[tuple[Engine, ...]] = get_args(Engine)


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Facts about a family that decide which jobs it admits."""

    pipeline: str
    """diffusers' pipeline class, or transformers' model class."""
    title: str
    """Common name of the model."""
    adapter: str
    """"module:class" of the `ModelAdapter`, or of the `SequenceAdapter` where the modality is text."""
    writer: str = ""
    """"module:class" of the `SequenceAdapter` of a flow that also writes text."""
    modality: Literal["image", "video", "text"] = "image"
    takes_images: int = 0
    """Prompts come with condition images, at most so many each."""
    images_optional: bool = False
    """Prompts may also come without condition images, all those of a job."""
    takes_media: bool = False
    """Prompts may come with pictures, sounds and films, in any number and size."""
    embedded_guidance: bool = False
    """Guidance is an input of the transformer: `rollout.embedded_guidance` has an effect."""
    holds_first_frame: bool = False
    """`rollout.from_image` has an effect: with it, and with it alone, prompts come with a condition image."""
    first_frame_flag: str = ""
    """Flag of `model_index.json` that a checkpoint needs for `rollout.from_image`; empty: none."""
    sounds: bool = False
    """Films have sound: `rollout.sound_share` has an effect."""
    guides_distilled: bool = True
    """A checkpoint whose index says `is_distilled` heeds `rollout.guidance_scale`."""
    branch_guidance: bool = False
    """`rollout.image_guidance_scale` and `rollout.guidance_renorm` have an effect."""
    max_sequence_length: int | None = None
    """The greatest `model.max_sequence_length`; None: prompts keep their own length, and it has no effect."""
    frame_multiple: int = 1
    """Frames that a latent frame stands for: `rollout.num_frames` is 1 more than a multiple of it."""
    shares_tokens: bool = False
    """Several devices can share a sample's tokens (sequence_parallel.py)."""
    shares_weights: bool = False
    """Several devices of a replica can share the weights of its transformers, and deal a batch's rows, in place of a
    sample's tokens: `_predict` names the transformer's arguments, which are tensors with a row a sample."""
    vae_multiple: int | None = None
    """Height and width are multiples of this many latent pixels; the VAE's configuration says how large these are. None
    leaves it to the adapter."""
    also_by: tuple[Engine, ...] = ()
    """Engines that sample it besides diffusers, or transformers for text."""
    layout: Layout | None = None
    """Where checkpoints hold the weights, as the adapter's `layout`; None: as diffusers writes them, or as the adapter
    alone knows."""

    def check_files(self, path: Path) -> None:
        """Raises ValueError as `check_model` does, of a layout that is known here; any other the adapter checks."""
        if self.layout or (path / "model_index.json").is_file():
            check_model(path, self.layout or PIPELINE)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Engines that sample the family."""
        usual: dict[Engine, bool] = {
            "diffusers": not self.writes_tokens,
            "transformers": self.trains(writes_tokens=True),
        }
        return (*(engine for engine, samples in usual.items() if samples), *self.also_by)

    @property
    def writes_tokens(self) -> bool:
        """True if all policies of the family write tokens."""
        return self.modality == "text"

    def trains(self, *, writes_tokens: bool) -> bool:
        """Returns True if the family has policies of that kind: those that write tokens, or flows."""
        return self.writes_tokens == writes_tokens or (writes_tokens and bool(self.writer))

    def load(self, *, writes_tokens: bool | None = None) -> Any:
        """Imports the adapter class; needs torch, and diffusers or transformers. `writes_tokens` chooses where a family
        has flows and policies that write tokens. Raises ValueError where the installed libraries lack the model."""
        is_writer = bool(writes_tokens and self.writer)
        module, name = (self.writer if is_writer else self.adapter).split(":")
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise ValueError(
                f"{self.title} cannot be loaded here: {error}. Install a newer diffusers or transformers "
                "(docs/models.md says which)"
            ) from error


FAMILIES: dict[str, ModelFamily] = {}
"""Families by pipeline class."""


def register(family: ModelFamily) -> None:
    """Raises ValueError if the pipeline class has a family already."""
    if family.pipeline in FAMILIES:
        raise ValueError(f"{family.pipeline} is registered already, as {FAMILIES[family.pipeline].title}")
    FAMILIES[family.pipeline] = family


_LAYOUTS: Final = {"bagel": BAGEL, "flat": FLAT, "transformers": TRANSFORMERS}
for _name, _fields in tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8")).items():
    _layout = _LAYOUTS[_fields.pop("layout")] if "layout" in _fields else None
    register(ModelFamily(_name, layout=_layout, also_by=tuple(_fields.pop("also_by", ())), **_fields))


def family_of(path: str | Path) -> ModelFamily:
    """The family of the checkpoint folder `path`, or of a name of the Hub; of plugins too.

    Raises:
        ValueError: no such folder, no configuration in it that names its class, or a class that is not supported.
    """
    plugins.load()
    name = _class_of(hub.configurations(path))
    if name not in FAMILIES:
        nearest = difflib.get_close_matches(name, FAMILIES, n=1)
        raise ValueError(
            f"model {path} is a {name}, which is not supported: use one of {', '.join(sorted(FAMILIES))}"
            f"{f' (the nearest is {nearest[0]})' if nearest else ''}, or install a plugin that registers it: "
            "docs/extending.md says how to write one"
        )
    return FAMILIES[name]


def adapter_for(path: str | Path) -> type[ModelAdapter]:
    """The adapter class for the folder of a flow; see `family_of`. Raises ValueError for one that writes text."""
    family = family_of(path)
    if family.writes_tokens:
        raise ValueError(f"model {path} is a {family.title}, which writes text, and a flow is needed here")
    adapter: type[ModelAdapter] = family.load()
    return adapter


def sequence_adapter_for(path: str | Path) -> type[SequenceAdapter]:
    """The adapter class for a folder of transformers; see `family_of`. Raises ValueError for a flow."""
    family = family_of(path)
    if not family.trains(writes_tokens=True):
        raise ValueError(f"model {path} is a {family.title}, and a model that writes text is needed here")
    adapter: type[SequenceAdapter] = family.load(writes_tokens=True)
    return adapter


def _class_of(path: Path) -> str:
    index, config = path / "model_index.json", path / "config.json"
    if not path.is_dir():
        raise ValueError(f"model path {path} is not a folder: give the folder of a checkpoint here")
    if index.is_file():
        return str(_read(index, lambda content: content["_class_name"], "a pipeline class in _class_name"))
    if config.is_file():
        return str(_read(config, lambda content: content["architectures"][0], "a model class in architectures"))
    raise ValueError(
        f"model path {path} has no model_index.json: give the folder of a whole diffusers pipeline, or one of "
        "transformers with a config.json"
    )


def _read(file: Path, name_in: Callable[[Any], Any], what: str) -> Any:
    try:
        return name_in(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file} does not name {what}: {error!r}") from error
