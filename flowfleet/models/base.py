"""What a model family must offer to be sampled from and trained: the `ModelAdapter`, and the values it hands out.

The diffusers rollout engine and the trainer call the same adapter, so a velocity recomputed by the trainer is the
rollout's. An adapter knows prompts, schedule, velocity and decoding; it never knows an algorithm. Latents are float32
everywhere outside the transformer. Random numbers depend on a sample's seed alone, never on its batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from flowfleet.seeds import derive_seed

Component = Literal["transformer", "text_encoder", "vae"]
"""A part of a checkpoint that costs memory. The tokenizer comes with the text encoder, the scheduler config always."""

ALL_COMPONENTS: tuple[Component, ...] = ("transformer", "text_encoder", "vae")


@dataclass(frozen=True)
class PromptEmbeds:
    """Encoded prompts, right-padded to one width with zero vectors."""

    embeds: Tensor
    """(B, L, D) in the text encoder's dtype."""
    mask: Tensor
    """(B, L) bool, False where padded."""
    has_padding: bool | None = None
    """Whether any token is padding. Found out once here if not given, for asking a device costs a synchronisation."""

    def __post_init__(self) -> None:
        if self.embeds.ndim != 3 or self.embeds.shape[:2] != self.mask.shape or self.mask.dtype != torch.bool:
            shapes = f"{tuple(self.embeds.shape)} and {tuple(self.mask.shape)} {self.mask.dtype}"
            raise ValueError(f"need embeds (B, L, D) and a bool mask (B, L), but got {shapes}")
        if self.has_padding is None:
            object.__setattr__(self, "has_padding", not bool(self.mask.all()))

    def __len__(self) -> int:
        return len(self.embeds)

    def repeat(self, count: int) -> "PromptEmbeds":
        """Every prompt `count` times in a row: (B * count, L, D), as a group of samples needs it."""
        embeds, mask = self.embeds.repeat_interleave(count, 0), self.mask.repeat_interleave(count, 0)
        return PromptEmbeds(embeds, mask, self.has_padding)

    def select(self, rows: Tensor | Sequence[int]) -> "PromptEmbeds":
        """The given rows, in that order; rows may repeat."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.embeds.device)
        return PromptEmbeds(self.embeds[index], self.mask[index])

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "PromptEmbeds":
        """The same prompts on `device`, embeds in `dtype` if given."""
        return PromptEmbeds(self.embeds.to(device, dtype), self.mask.to(device), self.has_padding)


def concat_embeds(parts: Sequence[PromptEmbeds]) -> PromptEmbeds:
    """One batch of all `parts`, in order, padded to the widest."""
    width = max(part.embeds.shape[1] for part in parts)
    padded = [pad_embeds(part, width) for part in parts]
    return PromptEmbeds(torch.cat([part.embeds for part in padded]), torch.cat([part.mask for part in padded]))


def pad_embeds(prompts: PromptEmbeds, width: int) -> PromptEmbeds:
    """Right-pads to `width` tokens. Raises ValueError if the prompts are wider."""
    missing = width - prompts.embeds.shape[1]
    if missing < 0:
        raise ValueError(f"prompts of {prompts.embeds.shape[1]} tokens do not fit the padded width of {width}")
    if missing == 0:
        return prompts
    pad = torch.nn.functional.pad
    return PromptEmbeds(pad(prompts.embeds, (0, 0, 0, missing)), pad(prompts.mask, (0, missing), value=False))


@dataclass(frozen=True)
class Schedule:
    """Noise levels of a sampling run, float32 on the CPU."""

    timesteps: Tensor
    """(N,) in the model's units (0 to 1000); what `velocity` takes."""
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
    """One model family. Make it with `load`; the attributes of components that were not loaded are None."""

    lora_targets: ClassVar[tuple[str, ...]]
    """Module names that a LoRA of this family adapts by default, as PEFT's `target_modules`."""

    transformer: Any
    """The diffusers transformer; `velocity` takes it as argument, because trainers wrap it."""
    text_encoder: Any
    vae: Any
    dtype: torch.dtype
    """What the transformer's inputs are cast to. A trainer may set it."""
    device: torch.device

    @classmethod
    @abstractmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        components: tuple[Component, ...] = ALL_COMPONENTS,
    ) -> Self:
        """Loads the named components of a local checkpoint folder, frozen and in evaluation mode; never downloads.

        Raises ValueError if the folder lacks a component or cannot be read.
        """

    @abstractmethod
    def encode(self, prompts: Sequence[str], *, pad_to: int | None = None) -> PromptEmbeds:
        """(B, L, D) embeds on the adapter's device, L the longest prompt or `pad_to`. Needs the text encoder.

        Raises ValueError for no prompts, or one longer than `pad_to`.
        """

    @abstractmethod
    def schedule(self, num_steps: int, height: int, width: int) -> Schedule:
        """The schedule of a size in pixels, from the scheduler's configuration alone: equal bits in every process."""

    @abstractmethod
    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one sample's latents. Raises ValueError for a size in pixels that the model cannot draw."""

    @abstractmethod
    def initial_latents(self, seeds: Sequence[int], height: int, width: int) -> Tensor:
        """(B, *latent_shape) float32 standard normal on the CPU, row i from seeds[i] alone."""

    def step_noise(self, seeds: Sequence[int], step_index: int, shape: Sequence[int]) -> Tensor:
        """(B, *shape) float32 standard normal on the CPU for sampling step `step_index`, row i from seeds[i] alone."""
        return seeded_noise([derive_seed(seed, "step_noise", step_index) for seed in seeds], shape)

    @abstractmethod
    def velocity(
        self,
        transformer: Any,
        latents: Tensor,
        timestep: Tensor,
        prompts: PromptEmbeds,
        *,
        height: int,
        width: int,
        negative: PromptEmbeds | None = None,
        guidance_scale: float = 1.0,
    ) -> Tensor:
        """dx/dsigma (B, *latent_shape) float32, guided if `guidance_scale` is above 1; gradients flow.

        Args:
            transformer: the adapter's, or the trainer's wrapping of it.
            latents: (B, *latent_shape) float32.
            timestep: 0-d or (B,) float32 from `Schedule.timesteps`.
            prompts: B rows.
            height, width: pixels.
            negative: 1 or B rows; needed if guided, unused if not.
            guidance_scale: 1 is off.
        """

    @abstractmethod
    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Images (B, H, W, 3) uint8 on the CPU from final latents. Needs the VAE."""


def seeded_noise(seeds: Sequence[int], shape: Sequence[int]) -> Tensor:
    """(B, *shape) float32 standard normal on the CPU; row i is the first draw of a generator seeded with seeds[i]."""
    noise = torch.empty(len(seeds), *shape)
    generator = torch.Generator()
    for row, seed in zip(noise, seeds, strict=True):
        row.normal_(generator=generator.manual_seed(seed))
    return noise
