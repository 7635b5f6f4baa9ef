"""`ModelAdapter`, the interface of a model family for sampling and training, and the values that it hands out.

The diffusers rollout engine and the trainer call the same adapter, so a velocity recomputed by the trainer is the
rollout's. An adapter knows prompts, schedule, velocity and decoding; it never knows an algorithm. Latents are float32
everywhere outside the transformer. Random numbers depend on a sample's seed alone, never on its batch.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import torch
from PIL import Image
from torch import Tensor, nn

from flowfleet.models import branches
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.level_tables import LevelLayers, table_of
from flowfleet.models.loading import (
    ALL_COMPONENTS,
    USUAL_PARTS,
    Component,
    LoadFormat,
    Parts,
    StoredNames,
    component_config,
    load_pipeline,
)
from flowfleet.models.settings import NO_GUIDANCE, Guidance, Size
from flowfleet.models.token_plan import TokenPlan
from flowfleet.models.weight_files import PIPELINE, Layout
from flowfleet.seeds import derive_seed

log = logging.getLogger(__name__)
TILE: Final = 512
"""Pixels that a tile of a VAE without a size of its own is wide and high."""


class NotFinite(ValueError):
    """Numbers of a sample are NaN or infinite."""


@dataclass(frozen=True)
class Schedule:
    """Noise levels of a sampling run, float32 on the CPU."""

    timesteps: Tensor
    """(N,) in the model's units (1000 sigma); what `velocity` takes."""
    sigmas: Tensor
    """(N + 1,) falling from 1 to 0; step i goes from sigmas[i] to sigmas[i + 1]."""

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)

    @property
    def sigma_max(self) -> Tensor:
        """0-d: the second sigma, which the step formulas want."""
        return self.sigmas[1]


class ModelAdapter(ABC):
    """Base of the model families: each works on the components of its diffusers pipeline. `load` makes an adapter.

    A family gives `pipeline_class`, `vae_class`, `lora_targets` and the abstract methods, and overrides what differs
    from the usual. Facts about components that were not loaded come from their configuration.
    """

    pipeline_class: ClassVar[Any]
    """diffusers' pipeline class."""
    vae_class: ClassVar[Any]
    """diffusers' class of the component `vae`."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Module names that a LoRA of this family adapts by default, as PEFT's `target_modules`."""
    skips_branches: bool = True
    """True if a forward outside of guidance's interval is left out. Must be False where all ranks must run equally many
    forwards, because their noise levels may differ."""
    joins_branches: bool = False
    """True if small branches of guidance may go in one forward. Must be False where all ranks must run equally many
    forwards, and where a trainer's numbers must equal the rollout's bit for bit."""
    cuts_padding: ClassVar[bool] = False
    """True if `_predict` takes prompts with `half_widths`."""
    takes_guidance: bool = True
    """False for a checkpoint that ignores guidance, because it was distilled to need none."""
    parts: ClassVar[Parts] = USUAL_PARTS
    """Names of the pipeline's components for each part of the model."""
    layout: ClassVar[Layout] = PIPELINE
    """Where a checkpoint holds the transformers' weights."""
    stored: ClassVar[StoredNames | None] = None
    """How the transformer is stored where a checkpoint is one folder of files (models/files.py); None: diffusers'
    layout. Such a family overrides `_load`, and needs neither `pipeline_class` nor `vae_class`."""
    own_parts: ClassVar[tuple[str, ...]] = ()
    """Parts of the pipeline that the family makes in `_load`, and diffusers does not."""
    level_layers: ClassVar[LevelLayers | None] = None
    """Layers that read the noise level alone, where a float8 base can hold a table of their outputs; the family's
    `_predict` gives the transformer its rows then."""
    token_plan: ClassVar[TokenPlan | None] = None
    """How devices share a sample's tokens; None: as diffusers' `_cp_plan`, where the family shares them."""
    token_multiple: int = 1
    """Devices that share a sample's tokens: a family that splits a prompt's tokens too pads them to a multiple."""

    vae_dtype: ClassVar[torch.dtype | None] = None
    """Data type that the VAE is loaded in; None is the model's dtype."""

    text_width: ClassVar[str] = "joint_attention_dim"
    """The transformer's setting that says how wide prompt embeddings are."""

    max_sequence_length: int | None = None
    """Tokens of a prompt in the longest text encoder, as diffusers' pipelines name it; a family with such a limit gives
    its default here and heeds what `limit_tokens` puts in its place. None: prompts keep their own length."""

    levels: Tensor
    """Noise levels of the newest `velocity`, as they were given."""
    clean_frames: int = 0
    """Latent frames that a condition image gives, where the family holds them clean: see `Size`."""

    fps: ClassVar[float] = 16.0
    """Frames of a film per second."""

    dtype: torch.dtype
    """Data type that the transformer's inputs are cast to. A trainer may set it."""
    device: torch.device
    boundary: float | None = None
    """Sigma from which upwards the first of two experts serves."""

    def __init__(self, pipeline: Any, vae_config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
        """Takes a `pipeline_class`, some of whose components may be None; use `load`."""
        self.dtype = dtype
        self.device = device
        self.pipeline = pipeline
        self.vae_config = vae_config

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        components: tuple[Component, ...] = ALL_COMPONENTS,
        load_format: LoadFormat = "safetensors",
    ) -> Self:
        """Loads the named components of a local checkpoint folder, frozen and in evaluation mode; never downloads.
        `load_format` says where their weights come from.

        Raises ValueError if the folder lacks a component or cannot be read.
        """
        if unknown := set(components) - set(ALL_COMPONENTS):
            raise ValueError(f"unknown components {sorted(unknown)}: choose from {', '.join(ALL_COMPONENTS)}")
        pipeline, vae_config = cls._load(path, dtype, device, components, load_format)
        return cls(pipeline, vae_config, dtype=dtype, device=torch.device(device))

    @classmethod
    def _load(
        cls, path: Any, dtype: torch.dtype, device: Any, components: Sequence[Component], load_format: LoadFormat
    ) -> tuple[Any, dict[str, Any]]:
        """The pipeline, and the VAE's configuration; see `load`."""
        vae_config = cls.configuration(path)
        pipeline = load_pipeline(
            cls.pipeline_class,
            path,
            dtype=dtype,
            device=device,
            components=components,
            parts=cls.parts,
            own_parts=cls.own_parts,
            vae_dtype=cls.vae_dtype,
            load_format=load_format,
        )
        return pipeline, vae_config

    @classmethod
    def configuration(cls, path: Any) -> dict[str, Any]:
        """The VAE's configuration. Raises ValueError for a checkpoint without."""
        return component_config(cls.vae_class, path, "vae")

    def complete(self, pipeline: Any) -> None:
        """Gives another pipeline of the same checkpoint the parts that this family makes by itself."""
        for part in self.own_parts:
            setattr(pipeline, part, getattr(self.pipeline, part))

    def limit_tokens(self, max_sequence_length: int | None) -> None:
        """Sets `max_sequence_length`; None leaves the family's default. Raises ValueError for a family without one."""
        if max_sequence_length is None:
            return
        if self.max_sequence_length is None:
            raise ValueError("prompts of this model keep their own length: leave model.max_sequence_length out")
        self.max_sequence_length = max_sequence_length

    @property
    def transformer(self) -> Any:
        """The diffusers transformer; with two experts the one of high noise."""
        return self.pipeline.transformer

    @property
    def text_encoder(self) -> Any:
        return self.pipeline.text_encoder

    @property
    def vae(self) -> Any:
        return self.pipeline.vae

    @property
    def experts(self) -> dict[str, nn.Module]:
        """Returns the transformers that are trained and published, by their component name in the pipeline."""
        named = {name: getattr(self.pipeline, name) for name in self.parts["transformer"]}
        return {name: module for name, module in named.items() if module is not None}

    def resize_conditions(self, pixels: int | None) -> None:
        """Sets the area of condition images; None is the family's own. Raises ValueError if the family takes none."""
        if pixels is not None:
            raise ValueError("this model resizes no condition images: remove sampling.condition_pixels")

    def size_conditions(self, size: Size) -> None:
        """Sets the size of condition images that stand for a part of the sample, in families that have such."""
        return

    def encode(self, prompts: Sequence[str], *, images: Sequence[Sequence[Image.Image]] | None = None) -> PromptEmbeds:
        """Encodes each prompt to one row on the adapter's device, padded to the longest. Needs the text encoder.

        Args:
            prompts: at least one.
            images: one sequence a prompt, for families that take images as condition (these need the VAE as well).

        Raises ValueError for no prompts, or images that this family does not take or lacks.
        """
        if self.text_encoder is None:
            raise ValueError("encode needs the text encoder: load the adapter with the component text_encoder")
        if not prompts:
            raise ValueError("encode needs at least one prompt")
        with torch.no_grad():
            return self._encode(list(prompts), None if images is None else [list(row) for row in images])

    def encode_negative(
        self, prompts: Sequence[str], *, images: Sequence[Sequence[Image.Image]] | None = None
    ) -> PromptEmbeds:
        """Encodes prompts that guidance leads away from, as `encode` does in all but a few families."""
        return self.encode(prompts, images=images)

    @abstractmethod
    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        """See `encode`. Most families call `without_images` first."""

    def blank_prompts(self, count: int, num_tokens: int) -> PromptEmbeds:
        """Zeros of the shapes that `encode` gives for `count` prompts of `num_tokens` each (where a prompt's length
        counts), on the adapter's device and in its dtype: for what depends on shapes alone, such as memory. Needs the
        transformer."""
        width = getattr(self.transformer.config, self.text_width)
        return PromptEmbeds.whole(torch.zeros(count, num_tokens, width, dtype=self.dtype, device=self.device))

    def blank_conditions(self, count: int, size: Size) -> dict[str, Tensor]:
        """Zeros of the extras that depend on the sample's size, for `blank_prompts`."""
        return {}

    @abstractmethod
    def schedule(self, num_steps: int, size: Size, shift: float | None = None) -> Schedule:
        """The schedule of a size, from the scheduler's configuration alone: equal bits in every process. `shift` is a
        static one in place of the configuration's."""

    @abstractmethod
    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """Shape of one sample's latents. Raises ValueError for a size that the model cannot draw."""

    def part_lengths(self, size: Size) -> tuple[int, ...]:
        """Elements of a film's picture and of its sound, which flat latents hold in this order; () for silent films and
        pictures."""
        return ()

    def shared_tokens(self, size: Size) -> tuple[int, ...]:
        """Numbers of tokens of which devices that share a sample have equal parts: of packed latents here."""
        return (self.latent_shape(size.whole)[0],)

    def initial_latents(self, seeds: Sequence[int], size: Size) -> Tensor:
        """(B, *latent_shape) float32 standard normal on the CPU, row i from seeds[i] alone: the numbers that the
        pipeline draws from a CPU generator of that seed."""
        return seeded_noise(seeds, self.latent_shape(size))

    def step_noise(self, seeds: Sequence[int], step_index: int, shape: Sequence[int]) -> Tensor:
        """(B, *shape) float32 standard normal on the CPU for sampling step `step_index`, row i from seeds[i] alone."""
        return seeded_noise([derive_seed(seed, "step_noise", step_index) for seed in seeds], shape)

    def velocity(
        self,
        latents: Tensor,
        timestep: Tensor,
        prompts: PromptEmbeds,
        *,
        size: Size,
        guidance: Guidance = NO_GUIDANCE,
        negative: PromptEmbeds | None = None,
    ) -> Tensor:
        """dx/dsigma (B, *latent_shape) float32, guided if wanted; gradients flow.

        Args:
            latents: (B, *latent_shape) float32.
            timestep: 0-d or (B,) float32, 1000 sigma. With two experts all rows must be of one expert; give it on the
                CPU then, for the choice reads its values, and to read them from a device waits for all its work.
            prompts: 1 or B rows.
            size: of the samples.
            guidance: see `Guidance`.
            negative: 1 or B rows; needed if guided, unused if not.
        """
        expert, self.levels = self.expert(timestep), timestep
        timesteps = timestep.to(latents.device, torch.float32).expand(len(latents))
        prompts = prompts.rows(len(latents))
        if not (guidance.is_on and self.takes_guidance):
            return self._predict(expert, latents, timesteps, prompts, size, guidance)
        if negative is None:
            raise ValueError(f"a guidance scale of {guidance.scale} needs negative prompt embeds")
        inside = _inside(timestep, guidance)
        if inside is not None and self.skips_branches and not bool(inside.any()):
            return self._predict(expert, latents, timesteps, prompts, size, guidance)
        negative = negative.rows(len(latents))
        positive, unwanted = self._predict_both(expert, latents, timesteps, prompts, negative, size, guidance)
        guided = self._guide(positive, unwanted, guidance)
        if inside is None or bool(inside.all()):
            return guided
        return torch.where(inside.to(guided.device).reshape(-1, *(1,) * (guided.ndim - 1)), guided, positive)

    def expect_levels(self, timesteps: Tensor) -> None:
        """Prepares for noise levels that `velocity` will be asked for, where a table needs them; others cost more."""
        for expert in self.experts.values():
            if (table := table_of(expert)) is not None:
                table.expect(timesteps)

    @abstractmethod
    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        """Runs one forward of `expert`, the transformer for these noise levels; `timesteps` (B,), `prompts` B rows.
        Returns the unguided velocity, (B, *latent_shape) float32."""

    def _predict_both(
        self,
        expert: Any,
        latents: Tensor,
        timesteps: Tensor,
        prompts: PromptEmbeds,
        negative: PromptEmbeds,
        size: Size,
        guidance: Guidance,
    ) -> tuple[Tensor, Tensor]:
        """The unguided velocities with both prompts, each of B rows."""
        both = None
        if self.joins_branches and branches.go_together(latents, prompts):
            both = branches.stacked(prompts, negative, widths_may_differ=self.cuts_padding)
        if both is None:
            positive = self._predict(expert, latents, timesteps, prompts, size, guidance)
            return positive, self._predict(expert, latents, timesteps, negative, size, guidance)
        twice = torch.cat([latents, latents]), torch.cat([timesteps, timesteps])
        positive, unwanted = self._predict(expert, *twice, both, size, guidance).chunk(2)
        return positive, unwanted

    def _guide(self, positive: Tensor, negative: Tensor, guidance: Guidance) -> Tensor:
        """The family's combination of both velocities; plain classifier-free guidance here."""
        return negative + guidance.scale * (positive - negative)

    def expert(self, timesteps: Tensor) -> Any:
        """The transformer for these noise levels, 0-d or (B,): the only one, or by the boundary."""
        modules = list(self.experts.values())
        if len(modules) == 1:
            return modules[0]
        assert self.boundary is not None, "two experts have a boundary"
        high = timesteps >= self.boundary * 1000
        if bool(high.all()):
            return modules[0]
        if bool(high.any()):
            raise ValueError("rows of one forward must all lie on one side of the experts' boundary")
        return modules[1]

    def decode(self, latents: Tensor, size: Size, prompts: PromptEmbeds | None = None) -> Tensor:
        """Frames (B, F, H, W, 3) uint8 on the CPU from final latents; F is 1 for pictures. Needs the VAE, and where the
        size has clean frames the prompts, 1 or B rows."""
        if self.vae is None:
            raise ValueError("decode needs the VAE: load the adapter with the component vae")
        if size.clean_frames:
            assert prompts is not None, "clean frames are the prompts'"
            latents = self._joined(latents, prompts.rows(len(latents)))
        with torch.no_grad():
            return self._decode_in_room(latents, size.whole)

    def _decode_in_room(self, latents: Tensor, size: Size) -> Tensor:
        """Decodes fewer rows at a time where memory does not suffice, and at last one in overlapping tiles."""
        try:
            return self._decode(latents, size)
        except torch.OutOfMemoryError:
            if len(latents) == 1 and not self._tile_decoding():
                raise
        parts = torch.split(latents, max(1, len(latents) // 2))
        return torch.cat([self._decode_in_room(part, size) for part in parts])

    def _tile_decoding(self) -> bool:
        """Returns False if the VAE has tiles already, or cannot have any."""
        if getattr(self.vae, "use_tiling", True):
            return False
        log.warning("no memory to decode a whole sample: the VAE decodes overlapping tiles from now on")
        self.vae.enable_tiling()
        if hasattr(self.vae, "tile_latent_min_size"):  # else as large as the sizes that it was trained on
            self.vae.tile_sample_min_size = TILE
            self.vae.tile_latent_min_size = TILE >> (len(self.vae.config.block_out_channels) - 1)
        return True

    def decode_sound(self, latents: Tensor, size: Size) -> tuple[Tensor, int]:
        """Returns the sounds (B, channels, samples) of final latents, float32 from -1 to 1 on the CPU, and their
        samples per second. For families with `part_lengths`. Needs the VAE."""
        raise NotImplementedError(f"{type(self).__name__} makes silent films")

    def _joined(self, latents: Tensor, prompts: PromptEmbeds) -> Tensor:
        """Latents with their clean frames."""
        raise NotImplementedError(f"{type(self).__name__} has no clean frames")

    @abstractmethod
    def _decode(self, latents: Tensor, size: Size) -> Tensor: ...

    def pixels(self, latents: Tensor, size: Size) -> Tensor:
        """Pictures (B, 3, H, W) float32 from 0 to 1 on the adapter's device, before they are rounded to `decode`'s;
        gradients flow. Needs the VAE. Raises ValueError for a family that decodes without gradient."""
        if self.vae is None:
            raise ValueError("pixels needs the VAE: load the adapter with the component vae")
        return (self._pixels(latents.to(self.device), size).float().clamp(-1, 1) + 1) / 2

    def checkpoint_decoding(self) -> None:
        """Has the VAE compute its activations again in the backward of `pixels`, where it can."""
        if getattr(self.vae, "_supports_gradient_checkpointing", False):
            self.vae.enable_gradient_checkpointing()

    def compile_decoding(self) -> None:
        """Has the VAE's decoder compile what gains by it, where there is such; `rollout.compile` asks for it."""
        return  # the other families' VAEs stay as they are

    def _pixels(self, latents: Tensor, size: Size) -> Tensor:
        """(B, 3, H, W) from -1 to 1, with gradient."""
        raise ValueError(
            f"{type(self).__name__} decodes without gradient: choose a loss that does not train on gradients of rewards"
        )

    def encode_media(self, frames: Tensor, size: Size) -> Tensor:
        """Latents (B, *latent_shape) float32 on the CPU of given frames (B, F, H, W, 3) uint8: the inverse of `decode`
        up to the VAE's loss (the mode of its posterior). Needs the VAE. For learning from a data set of media."""
        expected = (size.num_frames, size.height, size.width, 3)
        if tuple(frames.shape[1:]) != expected or frames.dtype != torch.uint8:
            raise ValueError(f"media must be uint8 {expected}, but they are {frames.dtype} {tuple(frames.shape[1:])}")
        if self.vae is None:
            raise ValueError("encode_media needs the VAE: load the adapter with the component vae")
        with torch.no_grad():
            return self._encode_media(frames, size)

    @abstractmethod
    def _encode_media(self, frames: Tensor, size: Size) -> Tensor: ...


def _inside(timestep: Tensor, guidance: Guidance) -> Tensor | None:
    """Which noise levels are guided, 0-d or (B,) bool; None: all."""
    low, high = guidance.interval
    if low <= 0 and high >= 1:
        return None
    return (timestep > 1000 * low) & (timestep <= 1000 * high)


def seeded_noise(seeds: Sequence[int], shape: Sequence[int]) -> Tensor:
    """(B, *shape) float32 standard normal on the CPU; row i is the first draw of a generator seeded with seeds[i]."""
    noise = torch.empty(len(seeds), *shape)
    generator = torch.Generator()
    for row, seed in zip(noise, seeds, strict=True):
        row.normal_(generator=generator.manual_seed(seed))
    return noise


def without_images(images: Sequence[Sequence[Image.Image]] | None) -> None:
    """Raises ValueError if any condition image is given, for families that take none."""
    if images is not None and any(len(row) for row in images):
        raise ValueError("this model takes no condition images: leave `images` out of the prompts")


def to_uint8(pixels: Tensor) -> Tensor:
    """Pixels in [-1, 1], channels second, (B, 3, [F,] H, W), to frames (B, F, H, W, 3) uint8 on the CPU."""
    if not pixels.is_meta and not bool(pixels.isfinite().all()):
        raise NotFinite("the VAE decodes to NaN or infinite pixels: check its weights, or set model.dtype")
    if pixels.ndim == 4:
        pixels = pixels.unsqueeze(2)
    levels = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return levels.permute(0, 2, 3, 4, 1).contiguous().cpu()


def to_pixels(frames: Tensor) -> Tensor:
    """Frames (B, F, H, W, 3) uint8 to pixels (B, 3, F, H, W) float32 in [-1, 1]."""
    return frames.permute(0, 4, 1, 2, 3).float() / 127.5 - 1
