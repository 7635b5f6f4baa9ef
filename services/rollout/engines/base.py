"""Interface of a rollout engine, and the plain values that go in and out. Nothing here knows calls, streams or blobs.

An engine holds one base model and at most one adapter, and does one thing at a time on its own thread or process. Its
methods are coroutines, so that a server can take requests meanwhile. It knows no jobs and no versions: the server calls
the methods that change weights only while nothing samples.

Randomness comes from the seeds of a request alone, so a repeated request makes the same samples bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowfleet.algorithms.samplers import SamplerName
from flowfleet.data.sequences import TokenTrajectory
from flowfleet.data.trajectories import FinalLatents, Trajectory
from flowfleet.media.sound import Sound
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.sequences.prompts import PromptMedia
from flowfleet.models.settings import NO_GUIDANCE, Guidance, Size
from flowfleet.process.pulse import Pulse
from flowfleet.proto.rollout_pb2 import Adapter, BatchProfile, Bucket, LoraSpec, ModelSpec
from flowfleet.weights.weights import Member
from services.rollout.engines.turns import Share

Record = Literal["none", "steps", "final", "tokens"]
"""Part of a sample that is kept: nothing, the noisy steps, the final latents, or the tokens."""


NO_FRAMES: Final = np.empty((0, 1, 1, 3), np.uint8)
"""Frames of a text."""


class Cancelled(Exception):
    """The caller is gone; raised between two denoising steps or tokens."""


NOT_FINITE: Final = (
    "its log-probs are NaN or infinite: the weights, the adapter or their data type overflow; check the model's files, "
    "or set model.dtype"
)


@dataclass(frozen=True, slots=True)
class Sampling:
    size: Size
    num_steps: int
    guidance: Guidance = NO_GUIDANCE
    negative_prompt: str = ""
    condition_pixels: int | None = None
    """Area that condition images are resized to; None is the family's default."""
    sampler: SamplerName = "euler"
    """The sampler of the steps without noise."""
    shift: float | None = None
    """Static shift of the noise levels; None is the checkpoint's."""
    full_precision: bool = False
    """True if linears that have float8 copies compute with their original weights."""
    sound_share: float | None = None
    """Weight of a film's sound in log-probs and KL; None: by its elements."""


@dataclass(frozen=True, slots=True)
class SequenceSampling:
    """How tokens are drawn."""

    max_tokens: int
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """Texts that end a sequence."""
    max_prompt_tokens: int | None = None
    routed_experts: bool = False
    """True if records hold the experts that each token took."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Where noise enters, and how. No steps: the ODE."""

    step_type: str = ""
    eta: float = 0.0
    steps: tuple[int, ...] = ()
    share_initial: bool = False
    """True if all samples of a group start from the same initial latents."""
    tail_steps: int = 0
    """Steps of `dpm_solver_2` after the last noisy one, in place of all that the schedule has there; 0 leaves those."""
    recorded: tuple[int, ...] = ()
    """The part of `steps` that is kept where steps are recorded; none: all."""

    @property
    def kept(self) -> tuple[int, ...]:
        """The noisy steps that are kept where steps are recorded."""
        return self.recorded or self.steps


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Samples of one prompt; `seeds` has one for each of `indices`, which rise."""

    group: int
    prompt: str
    indices: tuple[int, ...]
    seeds: tuple[int, ...]
    initial_seed: int = 0
    """Seed of the initial latent if the group shares it."""
    images: tuple[Image.Image, ...] = ()
    """Condition images, for families that take them."""
    media: tuple[np.ndarray, ...] = ()
    """Frames for each index, (F, H, W, 3) uint8: encoded to final latents instead of sampling."""
    negative_prompt: str | None = None
    """In place of the sampling's."""
    inputs: tuple[PromptMedia, ...] = ()
    """Pictures, sounds and films that come with the prompt, for a policy that writes tokens."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    groups: tuple[PromptGroup, ...]
    """In rising order."""
    sampling: Sampling
    """Without effect where `sequence` is set."""
    noise: Noise
    record: Record
    reference_kl: bool = False
    """True if each noisy step is compared with that of the policy without its adapter."""
    sequence: SequenceSampling | None = None
    """Set for a policy that writes tokens."""
    profile: bool = False
    """True if the first batch is profiled."""

    @property
    def num_samples(self) -> int:
        return sum(len(group.indices) for group in self.groups)


@dataclass(frozen=True, slots=True)
class GeneratedSample:
    group: int
    index: int
    seed: int
    record: Trajectory | FinalLatents | TokenTrajectory | None
    frames: np.ndarray = field(default_factory=lambda: NO_FRAMES)
    """(F, H, W, 3) uint8; one frame for pictures, none for a text."""
    sound: Sound | None = None
    fps: float = 16.0
    """Frames of a film per second."""
    reference_kl: float = 0.0
    """Mean over the noisy steps, if the request asked for it."""
    text: str | None = None
    """Text that a policy wrote, if it writes tokens."""
    prompt_tokens: int = 0
    num_tokens: int = 0
    stop_reason: str = ""
    failure: str = ""
    """Why there is no such sample."""

    @property
    def problem(self) -> str:
        """Why it must not be published; empty where it may."""
        log_probs = getattr(self.record, "log_probs", None)
        return self.failure or ("" if log_probs is None or bool(log_probs.isfinite().all()) else NOT_FINITE)


@dataclass(frozen=True, slots=True)
class GeneratedBatch:
    """Samples of one forward. Embeds are on the CPU and padded to the width that the forward saw."""

    samples: tuple[GeneratedSample, ...]
    embeds: Mapping[int, Any]
    """Group to its prompt: PromptEmbeds of one row, or the EncodedPrompt of a policy that writes tokens."""
    negative: Mapping[int, PromptEmbeds]
    """Group to its negative prompt, one row (the same object for all that share the sampling's, unless images condition
    it); empty without guidance."""
    seconds: Mapping[str, float]
    """Engine time by part: "encode", "denoise", "decode"; of tokens "decode", "log_probs"."""
    prompts: Mapping[str, int]
    """Prompts whose first sample is in the batch, by where their embeds came from: "cache", "encoder"."""
    profile: BatchProfile | None = None


class RolloutEngine(ABC):
    """See the module. Every method may raise ValueError for what the caller can change."""

    name: ClassVar[str]
    device: torch.device
    """Where the weights are; a transfer group is joined on it."""
    num_devices: int = 1
    """Devices that share each sample, from `device` on."""
    slots: int = 0
    """Adapters that it can have ready at once; 0: it samples for one job at a time."""
    idle_s: float = 0.0
    """Seconds without work since the first."""
    pulse: Pulse
    """Pulse to which the engine's thread reports its progress."""

    @property
    def is_stuck(self) -> bool:
        """True if the engine's work makes no progress, or the engine can do no more work."""
        return self.pulse.is_stuck

    @property
    def mixes(self) -> bool:
        """Returns True if one forward of the loaded model can have rows of several adapters, as far as is known."""
        return False

    @abstractmethod
    async def prepare(self, model: ModelSpec, lora: LoraSpec | None) -> None:
        """Makes the base model live, with an adapter of that shape or none. Loads and installs only what differs; base
        weights that were overwritten since are loaded again."""

    @abstractmethod
    def generate(
        self, request: GenerationRequest, cancelled: Callable[[], bool]
    ) -> AsyncGenerator[GeneratedBatch, None]:
        """Samples a request in batches, in (group, index) order, the next one already running while a batch is handled.

        `cancelled` is asked from the engine's thread before every denoising step; then Cancelled is raised.
        """

    @abstractmethod
    async def load_adapter(self, state: Mapping[str, Tensor]) -> None:
        """Puts a whole adapter into the live model. Raises ValueError unless names, shapes and dtypes are all its."""

    async def load_shared(self) -> None:
        """Puts the adapter that a trainer of this process has ready into the live model. Raises ValueError without such
        a trainer."""
        raise ValueError("source.shared: no trainer runs in this process: give an adapter blob or a broadcast")

    async def share(self, adapter: Adapter) -> None:
        """Makes the base of an adapter live and ready for slots, whose targets are those of this adapter."""
        raise NotImplementedError

    async def hold(self, slot: int, adapter: Adapter, state: Mapping[str, Tensor]) -> str:
        """Puts a whole adapter into a slot that nothing samples with, next to running work, and returns the digest of
        what lies there. Raises ValueError unless names, shapes and dtypes fit."""
        raise NotImplementedError

    def generate_with(
        self, slot: int, share: Share, request: GenerationRequest, cancelled: Callable[[], bool]
    ) -> AsyncGenerator[GeneratedBatch, None]:
        """Does what `generate` does, with the adapter of a slot and the turns of `share`."""
        raise NotImplementedError

    @abstractmethod
    async def receive(self, member: Member, buckets: Sequence[Bucket]) -> None:
        """Receives every bucket into the live weights: the adapter's if there is one, else all of the transformer's.

        Raises ValueError unless the buckets hold exactly those weights, before any is received.
        """

    @abstractmethod
    async def verify(self, hashes: Mapping[str, int]) -> str:
        """Compares the live weights that an update brings (as in `receive`), all of them, with the trainer's hashes and
        returns their digest (`flowfleet.weights.weights.digest`). Raises DataLoss where they differ."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the engine's thread once its running work is done."""


def forward_key(request: GenerationRequest) -> Hashable | None:
    """Returns what requests must have in common to share a forward; None for one that shares none: its condition
    images, media or tokens shape the forward."""
    if request.sequence is not None or any(group.images or group.media for group in request.groups):
        return None
    return replace(request.sampling, negative_prompt=""), request.noise, request.record, request.reference_kl
