"""`flowfleet plan JOB`: what a job needs, before anything is bought, loaded or started.

    skeleton (the model's classes on the meta device) → facts (sizes, activations, FLOPs) → memory, work → advice

`predict` is the whole of it. Peaks are of tensors, as `perf/peak_memory_gib` measures them; docs/planning.md tells how
far predictions were from measurements.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowfleet import hub
from flowfleet.hardware import devices
from flowfleet.hardware.cards import Card
from flowfleet.job.spec import JobSpec
from flowfleet.models.registry import family_of
from flowfleet.models.weight_files import has_weights
from flowfleet.planning.advice import advise
from flowfleet.planning.facts import gather
from flowfleet.planning.memory import (
    GIB,
    RESERVE,
    RolloutMemory,
    TrainerMemory,
    item_bytes,
    rollout_memory,
    trainer_memory,
)
from flowfleet.planning.speed import images_per_s
from flowfleet.planning.storage import TEXT_TOKENS, Storage, held_steps, storage
from flowfleet.planning.work import Work, work


@dataclass(frozen=True)
class Plan:
    """Bytes, FLOPs and counts."""

    params: int
    """Parameters of the transformers."""
    trained: int
    trainer: TrainerMemory
    """Memory of one rank."""
    rollout: RolloutMemory
    """Memory of one replica."""
    work: Work
    storage: Storage
    device_bytes: float | None
    """Memory of a device; None if it is not known."""
    held_steps: int
    """Steps whose samples are stored at once."""
    advice: tuple[str, ...]
    """Changes to make where something does not fit."""
    images_per_s: float | None
    """Predicted for a device that samples and trains for itself; None unless its kind is known."""

    @property
    def fits(self) -> bool | None:
        """None if the device is not known."""
        if self.device_bytes is None:
            return None
        return max(self.trainer.peak, self.rollout.peak) <= self.device_bytes - RESERVE

    def to_json(self) -> dict[str, Any]:
        """Plain values; memory in GiB, everything else in bytes, FLOPs or counts."""
        return {
            "params": self.params,
            "trained": self.trained,
            "trainer": {
                "gib": _gib(self.trainer.parts),
                "update_peak_gib": self.trainer.update_peak / GIB,
                "optimizer_peak_gib": self.trainer.optimizer_peak / GIB,
                "sampling_peak_gib": self.trainer.sampling_peak / GIB,
                "gradient_peak_gib": self.trainer.gradient_peak / GIB,
                "peak_gib": self.trainer.peak / GIB,
                "host_gib": self.trainer.host / GIB,
            },
            "rollout": {"gib": _gib(self.rollout.parts), "peak_gib": self.rollout.peak / GIB},
            "step": {**asdict(self.work), "flops": self.work.flops},
            "storage": {**asdict(self.storage), "held_steps": self.held_steps, "total": self.storage.total},
            "device_memory_gib": None if self.device_bytes is None else self.device_bytes / GIB,
            "fits": self.fits,
            "predicted_images_per_s": self.images_per_s,
            "advice": list(self.advice),
        }


def predict(
    spec: JobSpec,
    *,
    device_memory_gib: float | None = None,
    card: Card | None = None,
    text_tokens: int = TEXT_TOKENS,
    held_out: int = 0,
) -> Plan:
    """Predicts a job's memory and work from its model folder's configurations; weights need not be there, but where
    some are they must be whole.

    Args:
        spec: the job; `model.path` as seen from here, or a name of the Hub.
        device_memory_gib: of each device, to compare with; None compares with nothing.
        card: kind of device, for a prediction of speed.
        held_out: number of held-out prompts, whose pictures are stored.
        text_tokens: of a prompt's embedding, for families where it depends on the prompt.

    Raises:
        ValueError: a folder without configurations, a model that is not supported, a size that it cannot draw.
    """
    if spec.writes_tokens:
        raise ValueError(
            f"algorithm.loss = {spec.loss.name}: jobs of models that write text cannot be planned yet; "
            "trainer.micro_batch_tokens bounds their activations"
        )
    if text_tokens < 1:
        raise ValueError(f"a prompt of {text_tokens} tokens: give at least 1")
    if device_memory_gib is not None and not RESERVE / GIB < device_memory_gib < math.inf:
        raise ValueError(
            f"a device of {device_memory_gib:g} GiB: give more than {RESERVE // GIB}, which are not for tensors"
        )
    text_tokens = min(text_tokens, spec.model.max_sequence_length or text_tokens)
    folder = str(hub.configurations(spec.model.path))
    if hub.name_of(spec.model.path) is None and spec.model.load_format == "safetensors" and has_weights(Path(folder)):
        family_of(folder).check_files(Path(folder))
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"path": folder})})
    facts = gather(spec, text_tokens, compiled=spec.trainer.compile)
    device = None if device_memory_gib is None else device_memory_gib * GIB
    adapter_bytes = facts.trained * item_bytes(spec) if spec.trainer.mode == "lora" else 0
    stored = storage(
        spec, latent=facts.latent, embeds_bytes=facts.embeds_bytes, adapter_bytes=adapter_bytes, held_out=held_out
    )
    of_step = work(spec, facts, text_tokens)
    return Plan(
        params=facts.params,
        trained=facts.trained,
        trainer=trainer_memory(spec, facts, device),
        rollout=rollout_memory(spec, facts, device),
        work=of_step,
        storage=stored,
        held_steps=held_steps(spec),
        device_bytes=device,
        advice=() if device is None else tuple(advise(spec, facts, device - RESERVE)),
        images_per_s=None if card is None else images_per_s(spec, of_step, card),
    )


def found_memory_gib() -> float | None:
    """Memory of this machine's accelerator; None without one."""
    size = devices.memory_bytes(devices.pick_device())
    return None if size is None else size / GIB


def _gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: size / GIB for name, size in parts.items()}
