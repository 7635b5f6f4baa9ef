"""Bytes that a job holds in the blob store and in Redis at its fullest. Free of torch: `flowfleet plan` knows sizes
from the model's classes, the controller at submit from its configurations (`latent_elements`).

A step's trajectories and prompts stay until all of the newest `schedule.keep_last` checkpoints cover it, its pictures
until it has ended, but for those of `schedule.keep_pictures`; pictures of validations stay for a day.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from flowfleet.algorithms.settings import NoiseLevelSettings
from flowfleet.job.spec import JobSpec
from flowfleet.models.settings import Size

FP32: Final = 4
TEXT_TOKENS: Final = 128
"""Default number of text tokens in a prompt, for models whose embedding length depends on the prompt."""
_TEXT_WIDTHS: Final = ("joint_attention_dim", "text_dim", "cap_feat_dim", "caption_channels", "context_in_dim")
TOKEN_BYTES: Final = 13
"""A token's id, log-prob and mask."""
PICTURE_SHARE, VIDEO_SHARE = 0.6, 0.1
"""Size of a usual PNG, and of a usual MP4, as a share of its pixels' three bytes."""
KEY_BYTES: Final = 200
"""A blob's key and its place in Redis."""
HEADER_BYTES: Final = 600
"""Bytes of a trajectory's blob besides latents."""
HELD_BYTES, RECORD_BYTES = 1800, 900
"""References of a sample that may be trained on again, and what people see of one, in Redis."""
MAX_RECORDS: Final = 100_000
"""Training samples that people see, at most (services/controller/store/samples.py)."""
ADAPTERS_KEPT: Final = 3
"""Newest adapters that replicas may pull (services/trainer/worker.py)."""


@dataclass(frozen=True)
class Storage:
    """Bytes."""

    trajectories: int
    prompts: int
    pictures: int
    """Pictures of training samples."""
    validation: int
    """Pictures of one validation."""
    validations: int
    """Pictures of all validations, as if they took no more than a day."""
    adapters: int
    records: int
    """In Redis wherever blobs are."""

    def __str__(self) -> str:
        parts = {
            "trajectories": self.trajectories,
            "prompts": self.prompts,
            "pictures of samples": self.pictures,
            "pictures of a validation": self.validation,
            "adapters": self.adapters,
            "records": self.records,
        }
        return ", ".join(f"{name} {size / 2**30:.3g}" for name, size in parts.items() if size)

    @property
    def total(self) -> int:
        """At most."""
        return self.needed - self.validation + self.validations

    @property
    def needed(self) -> int:
        """At one moment even of a job whose validations are days apart."""
        parts = (self.trajectories, self.prompts, self.pictures, self.validation, self.adapters, self.records)
        return sum(parts)


def storage(spec: JobSpec, *, latent: int, embeds_bytes: int, adapter_bytes: int = 0, held_out: int = 0) -> Storage:
    """`latent`: elements of one sample; `embeds_bytes`: of one prompt; `held_out`: number of held-out prompts."""
    schedule, samples = spec.schedule, spec.rollout.prompts_per_step * spec.rollout.made_of_group
    steps, open_steps = held_steps(spec), min(schedule.steps, 1 + schedule.max_staleness)
    num_rankings = 2 if len(spec.rewards) == 1 else 2 + len(spec.rewards)
    pictures = open_steps * samples + schedule.keep_pictures * num_rankings
    everything = schedule.steps * samples
    validations = 1 + math.ceil(schedule.steps / schedule.validate_every)
    shown = held_out * schedule.validation_samples
    validation = shown * blob_bytes(_media_bytes(spec, spec.validation_size))
    return Storage(
        trajectories=steps * samples * blob_bytes(trajectory_bytes(spec, latent) + HEADER_BYTES),
        prompts=steps * spec.rollout.prompts_per_step * blob_bytes(embeds_bytes),
        pictures=min(pictures, everything) * blob_bytes(_media_bytes(spec, spec.rollout.size)),
        validation=validation,
        validations=validations * validation,
        adapters=min(ADAPTERS_KEPT, schedule.steps + 1) * blob_bytes(adapter_bytes),
        records=steps * samples * HELD_BYTES + (min(everything, MAX_RECORDS) + validations * shown) * RECORD_BYTES,
    )


def held_steps(spec: JobSpec) -> int:
    """Steps whose trajectories are there at once, at most: just before a checkpoint lets the oldest go."""
    part = spec.schedule
    saves = list(islice(chain(range(part.save_every, part.steps, part.save_every), [part.steps]), part.keep_last + 2))
    freed = [0, *(saves[max(0, number - part.keep_last)] for number in range(1, len(saves)))]
    held = (
        save - first + min(1 + part.max_staleness, part.steps - save) for save, first in zip(saves, freed, strict=True)
    )
    return max(held)


def num_rounds(spec: JobSpec) -> int:
    """Rows of a sample, at most: the noisy steps that are trained, or the noise levels of a matching loss."""
    return spec.window.most if spec.records_steps else spec.algorithm.of(NoiseLevelSettings).num_noise_levels


def trajectory_bytes(spec: JobSpec, latent: int) -> int:
    """Bytes of one sample's record for the trainer."""
    if spec.writes_tokens:
        return spec.rollout.sequence.max_tokens * TOKEN_BYTES
    return (num_rounds(spec) + 1 if spec.records_steps else 1) * latent * FP32


def latent_elements(folder: Path, size: Size) -> int | None:
    """Elements of a sample's latents by the VAE's configuration; None where that does not say, as in checkpoints with a
    layout of their own and films with sound."""
    if (folder / "audio_vae").is_dir():
        return None
    try:
        config = json.loads((folder / "vae" / "config.json").read_text(encoding="utf-8"))
        channels = config.get("latent_channels") or config["z_dim"]
        space = pixels_per_latent(config)
        time = config.get("scale_factor_temporal") or 2 ** sum(config.get("temperal_downsample", ()))
        frames = 1 + (size.num_frames - 1) // time - size.clean_frames
        return int(channels * frames * (size.height // space) * (size.width // space))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):  # the adapter will say why
        return None


def pixels_per_latent(config: Mapping[str, Any]) -> int:
    """Pixels that a latent pixel is wide and high, by the VAE's configuration. Raises LookupError where it does not
    say."""
    levels = config.get("block_out_channels") or config.get("encoder_block_out_channels") or config.get("dim_mult")
    return int(config.get("scale_factor_spatial") or 2 ** (len(levels or config["dim_mult"]) - 1))


def prompt_bytes(folder: Path, spec: JobSpec) -> int:
    """Bytes of a prompt's embeddings by the transformer's configuration; 0 where that does not say."""
    try:
        config = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))
        width = next((int(config[name]) for name in _TEXT_WIDTHS if config.get(name)), 0)
        width = width or config.get("text_hidden_dim", 0) * config.get("num_text_layers", 0)
    except (OSError, ValueError, TypeError, AttributeError):
        return 0
    return width * (spec.model.max_sequence_length or TEXT_TOKENS) * (FP32 if spec.model.dtype == "float32" else 2)


def blob_bytes(size: int) -> int:
    """Bytes that a blob takes in Redis, whose allocator (jemalloc) rounds up to an eighth of a power of two."""
    unit = max(16, 1 << (size - 1).bit_length() >> 3) if size else 1
    return math.ceil(size / unit) * unit + KEY_BYTES if size else 0


def _media_bytes(spec: JobSpec, size: Size) -> int:
    if spec.writes_tokens:
        return spec.rollout.sequence.max_tokens * FP32
    share = VIDEO_SHARE if size.num_frames > 1 else PICTURE_SHARE
    return int(size.height * size.width * size.num_frames * 3 * share)
