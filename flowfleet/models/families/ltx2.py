"""LTX-2, https://arxiv.org/abs/2601.03233, on the components of diffusers' `LTX2Pipeline`: films with sound.

A sample's latents are flat, (B, N): the tokens of the picture, frame by frame, then those of the sound, 25 a second
(`part_lengths`). The transformer denoises both at one noise level. With `Size.clean_frames` a film begins with the
prompt's image, whose tokens are at timestep 0 and no part of the latents. A prompt is up to 1,024 tokens of Gemma. Two
connectors turn all of its layers into the embeddings for the picture and, as the extra `sound`, for the sound. They
fill padding with registers, so every token counts.
"""

import inspect
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video, LTX2Pipeline
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf, resolve_default_image_crf
from diffusers.video_processor import VideoProcessor
from PIL import Image
from torch import Tensor

from flowfleet.models.base import NotFinite, Schedule
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.loading import USUAL_PARTS, Parts, component_config
from flowfleet.models.schedules import flow_match_schedule
from flowfleet.models.settings import Guidance, Size
from flowfleet.models.token_plan import TokenPlan
from flowfleet.models.video_vae import FIRST_FRAME, VideoAdapter

SOUND = "sound"
"""Name of the extra: (B, L, D) the prompt's embeddings for the sound."""
_MEL_SCALE = 4
"""Rows of a mel spectrogram, and frequencies, of one latent."""
_ROTARY = {part: ContextParallelInput(split_dim=-2, split_output=True) for part in (0, 1)}
"""The rotary embedding, (B, T, D) or (B, heads, T, D / 2)."""
_UNUSED = ("processor", "prompt_enhancer", "duration_head")


class LTX2Adapter(VideoAdapter):
    """See `ModelAdapter`."""

    pipeline_class: ClassVar[Any] = LTX2Pipeline
    vae_class: ClassVar[Any] = AutoencoderKLLTX2Video
    fps = 24.0
    patch = 1
    clean_frames = 1
    text_width = "cross_attention_dim"
    max_sequence_length: int = 1024
    """Tokens of a prompt, a multiple of the connectors' registers."""
    lora_targets = (
        *("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"),
        *("audio_ff.net.0.proj", "audio_ff.net.2"),
    )
    parts: ClassVar[Parts] = {
        **USUAL_PARTS,
        "text_encoder": ("text_encoder", "tokenizer", "connectors"),
        "vae": ("vae", "audio_vae", "vocoder"),
    }
    token_plan = TokenPlan(
        {
            "": {
                "hidden_states": ContextParallelInput(split_dim=1),
                "timestep": ContextParallelInput(split_dim=1, expected_dims=2),  # where tokens have their own
            },
            "rope": _ROTARY,
            "cross_attn_rope": _ROTARY,
            "proj_out": ContextParallelOutput(gather_dim=1),
        },
        whole_keys=("attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn"),
        gathered_keys=("video_to_audio_attn",),
    )
    """The picture's tokens are shared; each device has the prompt and the sound whole. diffusers' own plan splits the
    rotary embedding of one kind in two, and not that of the picture's attention to the sound."""
    own_parts = tuple(name for name in _UNUSED if name in inspect.signature(LTX2Pipeline.__init__).parameters)

    def __init__(self, pipeline: Any, vae_config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pipeline, vae_config, dtype=dtype, device=device)
        sound, steps = vae_config["sound"], vae_config["spatio_temporal_scaling"]
        halvings = sum(steps) if not isinstance(steps, bool) else steps * (len(vae_config["layers_per_block"]) - 1)
        self._spatial_scale = vae_config["spatial_compression_ratio"] or vae_config["patch_size"] * 2**halvings
        self._temporal_scale = vae_config["temporal_compression_ratio"] or vae_config["patch_size_t"] * 2**halvings
        self._latent_channels = int(vae_config["latent_channels"])
        self._sound_channels, self._sound_bins = int(sound["latent_channels"]), int(sound["mel_bins"]) // _MEL_SCALE
        self._sounds_per_s = sound["sample_rate"] / sound["mel_hop_length"] / _MEL_SCALE
        if self.vae is not None:
            self._latents_mean = self.vae.latents_mean.reshape(1, -1, 1, 1, 1)
            self._latents_std = self.vae.latents_std.reshape(1, -1, 1, 1, 1) / self.vae.config.scaling_factor
        pipeline.video_processor = VideoProcessor(
            self._spatial_scale, resample="bilinear"
        )  # of the pipeline with images
        for expert in self.experts.values():
            expert._no_split_modules = expert._repeated_blocks  # diffusers lists them for compiling alone

    @classmethod
    def configuration(cls, path: str | Path) -> dict[str, Any]:
        sound = component_config(AutoencoderKLLTX2Audio, path, "audio_vae")
        return {**super().configuration(path), "sound": sound}

    def limit_tokens(self, max_sequence_length: int | None) -> None:
        connectors = getattr(self.pipeline, "connectors", None)
        registers = connectors.config.video_connector_num_learnable_registers if connectors is not None else 1
        if max_sequence_length is not None and max_sequence_length % registers:
            raise ValueError(f"model.max_sequence_length must be a multiple of {registers}, the connectors' registers")
        super().limit_tokens(max_sequence_length)

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        pipeline = self.pipeline
        embeds, mask, *_ = pipeline.encode_prompt(
            prompts,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=self.device,
        )
        picture, sound, mask = pipeline.connectors(embeds, mask, padding_side=pipeline.tokenizer.padding_side)
        if not bool(mask.all()):
            raise ValueError("this checkpoint's connectors have no registers, as LTX-2's do: it is not supported")
        return self._with_images(PromptEmbeds.whole(picture, {SOUND: sound}), images)

    def blank_prompts(self, count: int, num_tokens: int) -> PromptEmbeds:
        config = self.transformer.config
        both = config.cross_attention_dim, config.audio_cross_attention_dim
        widths = (config.caption_channels,) * 2 if config.use_prompt_embeddings else both
        shape = count, self.max_sequence_length
        picture, sound = (torch.zeros(*shape, width, dtype=self.dtype, device=self.device) for width in widths)
        return PromptEmbeds.whole(picture, {SOUND: sound})

    def schedule(self, num_steps: int, size: Size, shift: float | None = None) -> Schedule:
        _, frames, rows, columns = self._grid(size.whole)
        return flow_match_schedule(self.pipeline.scheduler.config, num_steps, frames * rows * columns, shift=shift)

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        return (sum(self.part_lengths(size)),)

    def _grid(self, size: Size) -> tuple[int, int, int, int]:
        """Channels, frames, rows and columns of the picture's latents. Raises ValueError."""
        channels, frames, rows, columns = super().latent_shape(size)
        if size.num_frames == 1:
            raise ValueError(f"films with sound have at least {self._temporal_scale + 1} frames: raise num_frames")
        return channels, frames, rows, columns

    def part_lengths(self, size: Size) -> tuple[int, int]:
        channels, frames, rows, columns = self._grid(size)
        return channels * frames * rows * columns, self._num_sounds(size) * self._sound_channels * self._sound_bins

    def shared_tokens(self, size: Size) -> tuple[int, ...]:
        return (prod(self._grid(size.whole)[1:]),)

    def _num_sounds(self, size: Size) -> int:
        """Latents of the sound, as the pipeline counts them."""
        return round(size.num_frames / self.fps * float(self._sounds_per_s))

    def initial_latents(self, seeds: Sequence[int], size: Size) -> Tensor:
        shape = 1, self._sound_channels, self._num_sounds(size), self._sound_bins
        rows, given = [], self.part_lengths(size.whole)[0] - self.part_lengths(size)[0]
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            picture = torch.randn(1, *self._grid(size.whole), generator=generator)
            sound = torch.randn(shape, generator=generator)
            rows.append(torch.cat([_packed(picture)[:, given:], LTX2Pipeline._pack_audio_latents(sound).flatten(1)], 1))
        return torch.cat(rows)

    def _joined(self, latents: Tensor, prompts: PromptEmbeds) -> Tensor:
        if FIRST_FRAME not in prompts.extras:
            raise ValueError("these prompts have no first frame: encode them with `images`")
        return torch.cat([_packed(prompts.extras[FIRST_FRAME].to(latents)), latents], dim=1)

    def _pixels_of(self, picture: Image.Image) -> Tensor:
        """Returns the frame as compressed as those that the model saw in training."""
        crf = resolve_default_image_crf(self.text_encoder)
        return super()._pixels_of(Image.fromarray(apply_image_conditioning_crf(np.array(picture.convert("RGB")), crf)))

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        lengths, given = self.part_lengths(size.whole), 0
        channels, frames, rows, columns = self._grid(size.whole)
        of_picture = timesteps
        if size.clean_frames:
            whole = self._joined(latents, prompts)
            given, latents = whole.shape[1] - latents.shape[1], whole
            clean = given // channels
            of_picture = torch.nn.functional.pad(
                timesteps[:, None].expand(-1, frames * rows * columns - clean), (clean, 0)
            )
        picture, sound = torch.split(latents.to(self.dtype), list(lengths), 1)
        outputs = expert(
            hidden_states=picture.reshape(len(latents), -1, channels),
            audio_hidden_states=sound.reshape(len(latents), self._num_sounds(size), -1),
            encoder_hidden_states=prompts.embeds.to(latents.device, self.dtype),
            audio_encoder_hidden_states=prompts.extras[SOUND].to(latents.device, self.dtype),
            timestep=of_picture,
            audio_timestep=timesteps,
            sigma=timesteps,
            num_frames=frames,
            height=rows,
            width=columns,
            fps=self.fps,
            audio_num_frames=self._num_sounds(size),
            use_cross_timestep=True,
            return_dict=False,
        )
        if outputs[1].requires_grad:  # each device that shares the picture's tokens has the same sound
            outputs[1].register_hook(lambda gradient: gradient / self.token_multiple)
        return torch.cat([output.flatten(1) for output in outputs], 1).float()[:, given:]

    def _decode(self, latents: Tensor, size: Size) -> Tensor:
        channels, *grid = self._grid(size)
        tokens = latents[:, : self.part_lengths(size)[0]].reshape(-1, *grid, channels)
        return super()._decode(tokens.movedim(-1, 1), size)

    @torch.no_grad()
    def decode_sound(self, latents: Tensor, size: Size) -> tuple[Tensor, int]:
        waves = self.waves(latents[:, self.part_lengths(size)[0] :], size)
        if not bool(waves.isfinite().all()):
            raise NotFinite("the vocoder makes NaN or infinite sound: check its weights, or set model.dtype")
        return waves.clamp(-1, 1).cpu(), int(self.pipeline.vocoder.config.output_sampling_rate)

    def waves(self, latents: Tensor, size: Size) -> Tensor:
        """(B, channels, samples) float32 of the sound's part of latents; gradients flow."""
        vae, length = self.pipeline.audio_vae, self._num_sounds(size)
        tokens = latents.to(self.device, torch.float32)
        tokens = tokens.reshape(len(latents), length, -1) * vae.latents_std.float() + vae.latents_mean.float()
        planes = LTX2Pipeline._unpack_audio_latents(tokens, length, num_mel_bins=self._sound_bins)
        waves: Tensor = self.pipeline.vocoder(vae.decode(planes.to(vae.dtype), return_dict=False)[0])
        return waves.float()

    def _encode_media(self, frames: Tensor, size: Size) -> Tensor:
        raise ValueError(
            "this model learns from films with sound, and a data set's films are read without: use prompts"
        )


def _packed(planes: Tensor) -> Tensor:
    """(B, Z, f, h, w) to flat tokens (B, f h w Z)."""
    return planes.movedim(1, -1).flatten(1)
