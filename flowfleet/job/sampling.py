"""How rollouts sample: `[rollout]` and its tables."""

from dataclasses import replace
from typing import Literal

from pydantic import Field, field_validator

from flowfleet.algorithms.registry import STEPS
from flowfleet.algorithms.samplers import SamplerName
from flowfleet.algorithms.windows import Window, WindowPart, late_start
from flowfleet.job.part import NAMES, Part, choice
from flowfleet.job.sequence import SequencePart
from flowfleet.limits import MAX_PROMPT_BYTES, check_bytes
from flowfleet.models.settings import Guidance, Renorm, Size
from flowfleet.part import rule

POOL = rule(r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$", NAMES.format(40))
"""The rule of a rollout pool's name."""


class NoisePart(Part):
    """The reverse step with noise of Flow-GRPO (`sde`), of CPS (`cps`) or of DanceGRPO (`dance_sde`)."""

    type: str = "sde"
    """The reverse step."""
    eta: float = Field(default=0.7, ge=0.0, le=4.0)
    """Noise level. 0 is the ODE, which has no log-probs: for losses that need none."""
    share_initial_noise: bool = False
    """Gives all samples of a group one initial latent (DanceGRPO)."""

    @field_validator("type")
    @classmethod
    def _known_type(cls, name: str) -> str:
        return choice(name, STEPS)


class PreviewPart(Part):
    """Select-then-train: all samples of a group are made cheaply first and scored; the best and the worst of them are
    made again exactly and trained on."""

    keep: int | None = Field(default=None, ge=2)
    """Samples of each group that are made again, the best and the worst half each. Unset: no previews, all are made."""
    num_inference_steps: int | None = Field(default=None, ge=2, le=1000)
    """Denoising steps of a preview, which then has no noise; unset: those of the sample, noise and all."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: previews compute in float8 as with `rollout.quantization`, and nothing else does."""


class RolloutPart(Part):
    pool: str = Field(default="default", pattern=POOL)
    """Rollout pool that samples for the job. Jobs of a pool take turns at its replicas, by whole steps."""
    prompts_per_step: int = Field(default=32, ge=1, le=65_536)
    """Prompts of one training step, a group of samples each."""
    group_size: int = Field(default=16, ge=1, le=4096)
    """Samples of one prompt, scored against each other."""
    height: int = Field(default=512, ge=16, le=8192, multiple_of=16)
    """Pixels."""
    width: int = Field(default=512, ge=16, le=8192, multiple_of=16)
    """Pixels."""
    num_frames: int = Field(default=1, ge=1, le=1025)
    """Number of frames of a video; 1 for pictures."""
    num_inference_steps: int = Field(default=10, ge=2, le=1000)
    """Denoising steps of the schedule."""
    sampler: SamplerName = "euler"
    """The steps of an ODE (`noise.eta` 0), in training and validation. dpm_solver_2: second order, more exact at as
    many model calls."""
    tail_steps: int | None = Field(default=None, ge=1, le=1000)
    """Steps of `dpm_solver_2` after the last noisy step (MixGRPO-Flash); unset: Euler's on the whole schedule.
    Validation has no tail."""
    shift: float | None = Field(default=None, gt=0.0, le=100.0)
    """Shift s of the noise levels in place of the checkpoint's, static for every size: u becomes s u / (1 + (s - 1) u).
    Unset: the checkpoint's."""
    guidance_scale: float = Field(default=1.0, ge=1.0, le=100.0)
    """True classifier-free guidance; 1 is off and halves the work."""
    embedded_guidance: float | None = Field(default=None, ge=0.0, le=100.0)
    """Guidance that a distilled model (FLUX.1-dev) takes as an input; unset: the family's default."""
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    """Noise levels above the first and up to the second take guidance; the others take one forward."""
    image_guidance_scale: float | None = Field(default=None, ge=1.0, le=100.0)
    """BAGEL: scale of the guidance branch without condition images; 1 is off. Unset: 1."""
    guidance_renorm: Renorm | None = None
    """BAGEL: what guidance may not lengthen: the sample's velocity (global), each token's (channel), or each token's
    after the text's branch alone (text_channel). Unset: global."""
    negative_prompt: str = " "
    """Prompt of the other branch of classifier-free guidance."""
    condition_pixels: int | None = Field(default=None, ge=256, le=2**24)
    """Area that condition images are resized to; unset: the family's default."""
    from_image: bool = False
    """Videos begin with the prompt's image, whose latent frame gets neither noise nor a loss: for Wan2.2 TI2V and
    LTX-2, which also make videos from text alone."""
    sound_share: float | None = Field(default=None, ge=0.0, le=1.0)
    """LTX-2: share of the sound's mean in log-probs, KL and losses; the picture has the rest. Unset: the sound's
    share of the elements, 2 % at 512 × 768, since ratios are then the whole film's, and Adam scales the sound's own
    layers by itself."""
    batch_size: int = Field(default=16, ge=1, le=4096)
    """Rows of one Generate call: whole groups are packed up to it."""
    compile: bool = False
    """Compile the transformer's blocks while sampling; the first batch of a shape waits for it."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: the linears of the transformer's blocks compute in float8 (e4m3, a scale a row) while sampling."""
    adapter: Literal["separate", "merged"] = "separate"
    """How a LoRA adapter is sampled with. separate: by products of its own. merged: each version is rounded into copies
    of the weights, which saves those products and replaces an early adapter's change by rounding noise."""
    max_log_prob_gap: float | None = Field(default=None, gt=0.0)
    """The job pauses when the mean |trainer's - rollout's log-prob| of a step's rows is above this; unset: never."""
    noise: NoisePart = NoisePart()
    window: WindowPart = WindowPart()
    preview: PreviewPart = PreviewPart()
    sequence: SequencePart = SequencePart()
    max_refills: int = Field(default=2, ge=0, le=100)
    """Replacements that a group may ask for in one step, for samples that could not be scored. 0: train on fewer and
    count them."""

    @property
    def noise_window(self) -> Window:
        """Which denoising steps carry noise, training step by training step."""
        return Window(num_steps=self.num_inference_steps, **self.window.model_dump())

    @property
    def made_of_group(self) -> int:
        """Samples of a group that are made in full: all, or those that previews choose."""
        return self.group_size if self.preview.keep is None else min(self.group_size, self.preview.keep)

    @property
    def late_window(self) -> Window:
        """`noise_window` of a loss that begins at late steps: up to the last step, and where neither `low` nor `high`
        is set, in the last quarter."""
        part, number = self.window, self.num_inference_steps
        low = late_start(number) if not part.low and part.high is None else part.low
        return Window(num_steps=number, **part.model_dump(exclude={"low", "high"}), low=low, high=part.high or number)

    @property
    def has_fp8_copies(self) -> bool:
        """True where rollouts hold float8 copies of weights, for all samples or for previews."""
        return self.quantization == "fp8" or self.previews_alone_in_fp8

    @property
    def previews_alone_in_fp8(self) -> bool:
        return self.quantization == "none" and self.preview.quantization == "fp8"

    @property
    def size(self) -> Size:
        return Size(self.height, self.width, self.num_frames, int(self.from_image))

    def size_of(self, size: tuple[int, int] | None) -> Size:
        """Size of the samples of a prompt whose line says width and height; those of others have the job's."""
        return self.size if size is None else replace(self.size, width=size[0], height=size[1])

    @property
    def guidance(self) -> Guidance:
        scale = self.image_guidance_scale or 1.0
        return Guidance(
            self.guidance_scale, self.embedded_guidance, self.guidance_interval, scale, self.guidance_renorm
        )

    @field_validator("guidance_interval")
    @classmethod
    def _interval_rises(cls, interval: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= interval[0] < interval[1] <= 1:
            raise ValueError("give two rising noise levels from 0 to 1")
        return interval

    @field_validator("negative_prompt")
    @classmethod
    def _negative_prompt_fits(cls, text: str) -> str:
        check_bytes("it", len(text.encode()), MAX_PROMPT_BYTES)
        return text
