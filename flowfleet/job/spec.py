"""The job file: what a user writes in TOML, YAML or JSON, and what every process gets.

One schema for all three formats. Unknown keys fail and name the nearest valid one; a combination that cannot work
fails here, at submit, with the setting to change. This module is free of torch: the controller has none.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from flowfleet import plugins
from flowfleet.algorithms.registry import ALGORITHMS, LOSSES, STEPS, Algorithm, Loss, Step
from flowfleet.algorithms.samplers import SamplerName
from flowfleet.algorithms.windows import AtEnd, Pace, Window, WindowStrategy, late_start
from flowfleet.job import reference
from flowfleet.job.data import DataPart
from flowfleet.job.part import Curve, Factor, Part
from flowfleet.job.rules import rules as combinations
from flowfleet.job.sequence import SequencePart
from flowfleet.job.setting_files import read_extended
from flowfleet.limits import MAX_PROMPT_BYTES, check_bytes
from flowfleet.models.settings import Guidance, Renorm, Size
from flowfleet.prompts.columns import Columns

MOST_HINTS = 20
"""Unknown settings for which names that are like theirs are looked up."""
REWARD_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
"""A part of names of metrics, of reasons and of settings: without dots and slashes, which divide those."""

Seconds = Annotated[float, Field(ge=0.1, le=604_800.0)]
"""A deadline: from a tenth of a second to a week."""


def _as_text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, bool | int | float) else value


Parameter = Annotated[str, BeforeValidator(_as_text)]
"""A parameter of a reward, as text."""


class ModelPart(Part):
    path: str = Field(min_length=1)
    """Directory of a diffusers pipeline or of a transformers model that writes text, readable by rollouts and trainer;
    or a pipeline of the Hugging Face Hub as ORG/NAME[@REVISION], where the operator lists it. A job keeps the commit
    that its submit found."""
    adapter: str | None = Field(default=None, min_length=1)
    """Adapter that a LoRA job starts from, readable by controller and trainer: the folder or file of an export of ours,
    diffusers' or PEFT's, or a checkpoint's folder. Unset: a new one, which changes nothing at first."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of the weights while sampling and of the forward pass while training. Latents stay fp32."""
    base: Literal["plain", "fp8"] = "plain"
    """fp8: large linears and experts of the transformer's blocks are held and multiplied in float8 (e4m3, a scale a
    row), by rollouts and trainer alike: the policy is that base and a bfloat16 adapter. The adapter is exported. LoRA
    only."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """dummy reads no weights: the folder needs configurations alone, and every process draws the same random ones from
    the parameters' names. For benchmarks."""
    max_sequence_length: int | None = Field(default=None, ge=1)
    """Tokens of a prompt in the longest text encoder; unset: the family's default (docs/models.md)."""


class NoisePart(Part):
    """The reverse step with noise of Flow-GRPO (`sde`), of CPS (`cps`) or of DanceGRPO (`dance_sde`)."""

    type: str = "sde"
    """The reverse step."""
    eta: float = Field(default=0.7, ge=0.0, le=4.0)
    """Noise level. 0 is the ODE, which has no log-probs: for losses that need none."""
    share_initial_noise: bool = False
    """One initial latent for all samples of a group (DanceGRPO)."""

    @field_validator("type")
    @classmethod
    def _known_type(cls, name: str) -> str:
        return _choice(name, STEPS)


class WindowPart(Part):
    """Denoising steps at which noise enters and which are trained. The same for all groups of a training step."""

    strategy: WindowStrategy = "random"
    """fixed: starts at `low`. random: start drawn every training step. progressive: moves up, then starts over. all:
    from `low` to `high`, whatever `size` is. listed: those of `steps`. fraction: noise from `low` to `high`, of which a
    share drawn every training step is trained."""
    size: int = Field(default=2, ge=1, le=1000)
    """Number of steps with noise."""
    low: int = Field(default=0, ge=0)
    """First step that may carry noise."""
    high: int | None = Field(default=None, ge=1)
    """End (exclusive) of the steps that may carry noise. Unset: half of the steps (at least `size`) for random, all but
    two for progressive, all but the last for the others."""
    stride: int = Field(default=1, ge=1)
    """Steps by which `progressive` moves the window."""
    shift_every: int = Field(default=1, ge=1)
    """Training steps after which `progressive` moves it; the first such number for a `pace` that is not constant."""
    pace: Pace = "constant"
    """How the number of training steps at one start changes. decay: falls linearly to `pace_min` at `high`. exp_decay:
    falls by the factor exp(-`pace_rate`) for each step beyond `pace_from`, rounded up."""
    pace_min: int | None = Field(default=None, ge=1)
    """Least number of training steps of `decay`; unset: a quarter of `shift_every`."""
    pace_from: int = Field(default=13, ge=0)
    """Start up to which `exp_decay` stays at `shift_every`."""
    pace_rate: float = Field(default=0.1, ge=0.0)
    """Rate of `exp_decay`."""
    at_end: AtEnd = "start_over"
    """What `progressive` does at `high`. start_over: windows that reach beyond it are cut, then it goes back to `low`.
    stay: it keeps the last whole window."""
    steps: tuple[int, ...] = ()
    """The noisy steps of `listed`, ascending from 0."""
    fraction: float = Field(default=0.6, gt=0.0, le=1.0)
    """Share of the noisy steps that `fraction` trains, rounded down."""
    allow_coarse: bool = False
    """Take steps whose noise is more than 4 times the noise level that they end at. The samples keep that noise."""


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
    pool: str = Field(default="default", pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")
    """Rollout pool that samples for the job. A pool serves one job at a time; others of the same pool wait."""
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
    on_drop: Literal["count", "refill"] = "refill"
    """A sample that could not be scored: ask for another of its group, or train on fewer and count it."""
    max_refills: int = Field(default=2, ge=0, le=100)
    """Replacements a group may ask for in one step."""

    @property
    def noise_window(self) -> Window:
        """Which denoising steps carry noise, training step by training step."""
        return Window(num_steps=self.num_inference_steps, **self.window.model_dump(exclude={"allow_coarse"}))

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
        return Window(
            num_steps=number,
            **part.model_dump(exclude={"allow_coarse", "low", "high"}),
            low=low,
            high=part.high or number,
        )

    @property
    def has_fp8_copies(self) -> bool:
        """Whether rollouts hold float8 copies of weights, for all samples or for previews."""
        return self.quantization == "fp8" or self.previews_alone_in_fp8

    @property
    def previews_alone_in_fp8(self) -> bool:
        return self.quantization == "none" and self.preview.quantization == "fp8"

    @property
    def size(self) -> Size:
        return Size(self.height, self.width, self.num_frames)

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


class CorrectionPart(Part):
    """What to do about samples that another engine or an older policy drew, by the ratio trainer / rollout of a row."""

    mode: Literal["none", "truncated", "band", "rejection"] = "none"
    """none: nothing. truncated: importance weights of at most `high`. band: importance weights, 0 outside low … high.
    rejection: rows outside low … high count for nothing, all others for 1."""
    low: float = Field(default=0.5, gt=0.0, le=1.0)
    """Least ratio of `band` and `rejection`."""
    high: float = Field(default=2.0, ge=1.0)
    """Greatest ratio."""
    joint: bool = False
    """Take the ratio of a step's joint density over all elements, not its geometric mean per element."""
    level: Literal["step", "sequence"] = "step"
    """What has a ratio of its own: each noisy step of a sample or token of a text, or the sample by all of them (with
    `joint` the product of their ratios, else the geometric mean)."""
    normalize: Literal["none", "batch"] = "none"
    """batch: divide the weights by their mean over the step's rows, before `reject_low` and `reject_high` act."""
    reject_low: float | None = Field(default=None, gt=0.0, le=1.0)
    """Rows whose ratio is below this count for nothing, whatever their weight; unset: none."""
    reject_high: float | None = Field(default=None, ge=1.0)
    """Rows whose ratio is above this count for nothing, whatever their weight; unset: none."""

    @property
    def needs_all_rows(self) -> bool:
        """Whether a row's weight depends on other rows, so that all old log-probs come before the first update."""
        return self.mode != "none" and (self.level == "sequence" or self.normalize == "batch")


class OldPolicyPart(Part):
    """The old policy of matching losses. After a training step that brings the job to n optimizer updates it keeps the
    share min(max, rate · (n − delay)) of itself and takes the rest from the trained one; 0 is on-policy."""

    samples: bool = True
    """It samples. false: the trained policy samples, and this one is only compared with."""
    rate: float = Field(default=0.001, ge=0.0, le=1.0)
    """Growth of the share an update. 1 makes it constant: `max` from the first update after `delay` on."""
    max: float = Field(default=0.5, ge=0.0, lt=1.0)
    """Greatest share."""
    delay: int = Field(default=0, ge=0)
    """Updates for which the share stays 0."""
    every: int = Field(default=1, ge=1)
    """Training steps from one move of the old policy to the next."""


class KlGatePart(Part):
    """GARDO's gate: `kl_coef` counts for the samples alone whose total other rewards doubt most."""

    rewards: tuple[str, ...] = ()
    """Rewards of weight 0 that doubt the total; none: `kl_coef` counts for all samples."""
    share: float = Field(default=0.1, gt=0.0, le=1.0)
    """Share of the doubted samples for which it counts."""


class KlReferencePart(Part):
    """GARDO's moving reference: what `kl_coef` holds to becomes the trained policy as it is. Unset: it stays the model
    before training."""

    every: int | None = Field(default=None, ge=1)
    """Training steps from one move to the next."""
    threshold: float | None = Field(default=None, gt=0.0)
    """It also moves after a step whose mean distance to it (`actor/kl_loss`) is above this."""

    @property
    def moves(self) -> bool:
        return self.every is not None or self.threshold is not None


class TeacherPart(Part):
    """A teacher of a distillation: an adapter on the job's own base."""

    adapter: str = Field(min_length=1)
    """Its adapter, readable by controller and trainer: `job:ID`, `job:ID@STEP`, or a path as in `model.adapter`. Rank,
    alpha and modules must be those of `trainer.lora`."""
    sources: tuple[str, ...] = ()
    """Names of the `data.sources` whose prompts it teaches. Unset: all of them, for an only teacher."""


class AlgorithmPart(Part):
    """`name` fills in what the job leaves out: step, window, loss, advantage (docs/algorithms.md)."""

    name: str = "flow_grpo"
    """Fills in what the job leaves out."""
    loss: str = "flow_grpo"
    """Unset: the algorithm's."""
    clip_range: float = Field(default=1e-5, gt=0.0, le=1.0)
    """Limit on the ratio of mean log-probs per latent element, or of AWM's and DGPO's likelihoods."""
    clip_nats: float | None = Field(default=None, gt=0.0)
    """The same limit in nats of the joint ratio; replaces `clip_range` and serves every resolution."""
    clip_range_low: float | None = Field(default=None, gt=0.0, lt=1.0)
    """How far the ratio counts below 1; unset: as far as above."""
    clip_nats_low: float | None = Field(default=None, gt=0.0)
    """The same limit in nats of the joint ratio; replaces `clip_range_low`."""
    step_weights: Literal["uniform", "noise"] = "uniform"
    """How much each noisy step counts in a policy loss. noise: as its std, over the mean of all steps that may carry
    noise (TempFlow-GRPO)."""
    kl_threshold: float = Field(default=1e-5, gt=0.0)
    """Flow-DPPO's trust region: KL of a step to the old policy's, mean over its elements."""
    kl_threshold_nats: float | None = Field(default=None, gt=0.0)
    """The same limit in nats of the whole step; replaces `kl_threshold` and serves every resolution."""
    beta: float = Field(default=0.1, gt=0.0)
    """DiffusionNFT: share of the trained policy in the two that are matched. DPO and DGPO: how close to the reference.
    ELBO policy gradient: how close to the old policy. CRD: factor of the model's own reward."""
    likelihood: Literal["velocity", "normalized_velocity", "x0", "normalized_x0", "huber"] = "velocity"
    """The error at a noise level that stands for minus a log-likelihood: the mean square of the velocity's or of the
    predicted x0's, each also over its mean size; or AWM's generalized Huber error."""
    proximal: bool = True
    """ELBO policy gradient: take the log-ratio to the old policy from the advantage (PEPG), or not (EPG)."""
    old_kl_coef: float = Field(default=0.0, ge=0.0)
    """AWM: weight of the squared distance to the old policy."""
    num_noise_levels: int = Field(default=4, ge=1, le=1000)
    """Noise levels at which a matching loss trains each sample of a step."""
    sigma_sampling: Literal["shifted", "uniform", "schedule"] = "shifted"
    """How those noise levels are drawn. shifted: uniform before the model's shift, so they lie as densely as the
    sampler's. uniform: uniform from `sigma_low` to `sigma_high`. schedule: the sampler's own, in a random order for
    each sample and pass, none twice in a pass."""
    sigma_low: float = Field(default=0.02, gt=0.0, lt=1.0)
    """Least of those noise levels; lower ones are raised to it. Not for `schedule`."""
    sigma_high: float = Field(default=0.98, gt=0.0, lt=1.0)
    """Greatest of those noise levels; higher ones are lowered to it. Not for `schedule`."""
    old_policy: OldPolicyPart = OldPolicyPart()
    advantage_mode: Literal["all", "positive", "negative", "sign", "positive_sign"] = "all"
    """What DiffusionNFT reads of an advantage: all of it; only what is above 0, or below (the rest counts as 0); its
    sign (−1, 0, 1); or 1 where it is above 0 and else 0."""
    align_step: float = Field(default=0.4, gt=0.0, le=1.0)
    """SRPO: how far one step of the policy lowers the noise level, but to no less than half of it. The known noise
    leads the rest of the way to an image."""
    discount_shift: float = Field(default=3.0, gt=0.0)
    """SRPO: how an image counts by the noise level s that the step ends at: d s / (1 + (d - 1) s)."""
    positive_words: tuple[str, ...] = ()
    """SRPO: control words before the prompt, such as "Realistic photo", whose reward is wanted; steps take them in
    turn. None: the reward of the prompt itself."""
    negative_words: tuple[str, ...] = ()
    """SRPO: control words before the prompt whose reward is unwanted; steps take them in turn."""
    relative_weight: float = Field(default=0.0, ge=0.0)
    """SRPO: k of (1 + k) times the wanted reward minus the unwanted one."""
    reward_ceiling: float | None = None
    """ReFL: rewards of at least this train no more; unset: all do."""
    pairs_per_group: int = Field(default=1, ge=1)
    """Pairs that online DPO makes of a group: best and worst, second best and second worst, …"""
    reward_combination: Literal["sum", "normalized", "separate"] = "sum"
    """Several rewards. sum: advantages of their weighted sum. normalized: the weighted sum of each one's own
    group-normalized advantages, normalized again over the batch (GDPO). separate: the weighted sum of each one's own
    advantages by `advantage_std`, not normalized again (MixGRPO)."""
    advantage_std: Literal["global", "group", "none"] = "global"
    """Divide centered rewards by the std (ddof 0) of the batch, of the group, or not at all."""
    advantage_clamp: float | None = Field(default=5.0, gt=0.0)
    """Advantages are cut to ± this; null leaves them."""
    aggregation: Literal["sequence", "token"] = "sequence"
    """Losses of tokens. sequence: mean over each sequence's tokens, then over sequences. token: mean over all tokens of
    an update, so that long sequences count for more."""
    overlong_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Last share of `rollout.sequence.max_tokens` in which a sequence's length costs, linearly, up to 1 off its reward
    at `max_tokens` (DAPO); 0: length costs nothing."""
    diversity: str | None = Field(default=None, min_length=1)
    """Reward of weight 0, such as one by the scorer `diversity`, that multiplies the advantages above 0: a sample's
    score over the mean of its group's (GARDO)."""
    teachers: dict[str, TeacherPart] = Field(default={})
    """Teachers that DiffusionOPD learns from, by names of your own. Each source of prompts has one."""
    best_of: int | None = Field(default=None, ge=2)
    """Samples of each group that are trained on: the best and the worst half each, by advantages that the whole group
    gave (DanceGRPO's best-of-n); null trains on all."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL (policy losses) or of the squared distance (matching losses) to the model before training. With
    `trainer.mode = "full"` this keeps a second copy of the weights."""
    kl_gate: KlGatePart = KlGatePart()
    kl_reference: KlReferencePart = KlReferencePart()
    kl_reward: float = Field(default=0.0, ge=0.0)
    """What a sample's KL to the model before training costs of its reward: the mean over its noisy steps, measured by
    the rollouts with the adapter off. LoRA only."""
    old_log_probs: Literal["first_forward", "recompute", "rollout"] = "first_forward"
    """Where the old log-probs come from: the update's own first forward where that is exact (else recomputed), always
    recomputed before the update, or the rollout's own (bypass)."""
    correction: CorrectionPart = CorrectionPart()

    @field_validator("name")
    @classmethod
    def _known_name(cls, name: str) -> str:
        return _choice(name, ALGORITHMS)

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, name: str) -> str:
        return _choice(name, LOSSES)


class LoraPart(Part):
    rank: int = Field(default=64, ge=1, le=4096)
    """Rank of the adapter's matrices."""
    alpha: float = Field(default=128.0, gt=0.0)
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] | None = None
    """Names of modules that are adapted; unset: those that suit the model's family."""
    merge: bool = False
    """Export a whole pipeline with the adapter merged into its transformers, in place of the adapter alone."""


class OptimizerPart(Part):
    """AdamW."""

    lr: float = Field(default=3e-4, gt=0.0, lt=1.0)
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=1e-4, ge=0.0)
    """Decoupled weight decay, multiplied by `lr`."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Norm that gradients are scaled down to."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How `lr` falls to `final_lr` between the warm-up and the job's last update: not at all, linearly, or by half a
    cosine."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates in which `lr` rises linearly from 0."""
    final_lr: float = Field(default=0.0, ge=0.0, lt=1.0)
    """The rate at which `linear` and `cosine` end."""
    state: Literal["device", "host", "8bit"] = "device"
    """Where the two moments are: fp32 next to the weights, fp32 in host memory, or 8 bits next to the weights."""


class EmaPart(Part):
    """An average of the trained weights, which is validated and exported in their place; nothing samples with it. After
    update n it keeps the share min(decay, (1 + n) / (10 + n)) of itself and takes the rest from the trained weights."""

    decay: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Greatest share; null: no average. 0 is the trained weights themselves, where an old policy samples."""
    every: int = Field(default=1, ge=1)
    """Updates from one step of the average to the next: it follows those n of which n + 1 is a multiple of this."""


class TrainerPart(Part):
    mode: Literal["lora", "full"] = "lora"
    """lora: train an adapter on frozen weights. full: train all weights of the transformer."""
    lora: LoraPart = LoraPart()
    optimizer: OptimizerPart = OptimizerPart()
    ema: EmaPart = EmaPart()
    resume: str | None = Field(default=None, min_length=1)
    """Checkpoint that the job starts from, with all moments, averages and the old policy: `job:ID@STEP`, or its folder,
    readable by controller and trainer. Model, adapter and losses must keep the same tensors. The job's own steps and
    learning rate start from 0."""
    world_size: int = Field(default=1, ge=1, le=4096)
    """Ranks of torchrun, one an accelerator."""
    sharding: Literal["auto", "replicate", "fsdp"] = "auto"
    """How ranks hold the model. replicate: each holds all of it and only an adapter's gradients travel (LoRA). fsdp:
    they share it and gather a block at a time. auto: replicate for LoRA where the base takes at most half of a device's
    memory, else fsdp."""
    updates_per_step: int = Field(default=1, ge=1, le=64)
    """Optimizer updates a step; the samples of the step are split among them, in fewer if there are too few. Unset: the
    loss's, 2 where it limits the ratio to the old policy, which is 1 in the only update of a step."""
    passes: int = Field(default=1, ge=1, le=64)
    """Number of passes through a step's samples, each of `updates_per_step` updates. The old policy is the one before
    the first."""
    micro_batch_size: int = Field(default=16, ge=1, le=4096)
    """Rows of one forward and backward on one rank. Of sequences: `micro_batch_tokens` counts in its place."""
    micro_batch_tokens: int = Field(default=8192, ge=1, le=16_777_216)
    """Tokens of one forward and backward on one rank, prompts counted, that sequences are packed into without padding.
    A longer sequence is alone."""
    gradient_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations that are computed again in the backward: none, all but the costly ones (matrix products and
    attention), or all inside a block."""
    base_gradients: Literal["fp8", "bf16"] = "fp8"
    """How the backward multiplies by an fp8 base (`model.base`). bf16 is slower and closer to the exact gradient."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: large linears of the transformer's blocks compute in float8 (e4m3, a scale a row), in the forward and for
    the gradients of their inputs. Weights, their gradients and the optimizer stay as they are, and experts of a mixture
    compute in `model.dtype`. `mode = "full"` only."""
    compile: bool = False
    """Compile the transformer's blocks; the first update of a shape waits for it."""
    deterministic: bool = False
    """Keep the rollout's batches and their order, so that log-probs are recomputed bit for bit."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads a rank; unset: all cores shared by the ranks."""
    samples: Literal["no", "idle", "only"] = "no"
    """Whether the trainer's ranks sample as replicas of their own job. idle: in addition to rollouts, between updates.
    only: no rollouts at all, strictly on-policy."""


class GatePart(Part):
    """A guard: what becomes of a sample whose raw score is on the wrong side. Give `below` or `above`."""

    below: float | None = None
    """It acts on scores below this."""
    above: float | None = None
    """It acts on scores above this."""
    action: Literal["zero", "mask"] = "zero"
    """zero: the sample's total is 0, whatever its other rewards say. mask: the sample is not trained on; it is counted
    as `gated_NAME` and no other is asked for in its place."""

    @model_validator(mode="after")
    def _one_side(self) -> GatePart:
        if (self.below is None) == (self.above is None):
            raise ValueError("a gate needs one limit: give it either `below` or `above`")
        return self

    def shut(self, score: float) -> bool:
        """Whether it acts on a sample of this raw score."""
        return score < self.below if self.below is not None else self.above is not None and score > self.above


class RewardPart(Part):
    service: str | None = Field(default=None, min_length=1)
    """Name of the reward service; unset: the reward's own name. Several rewards may ask one service."""
    weight: Factor = 1.0
    """Weight of the score in the sum. 0 only watches, or guards with `gate`."""
    params: dict[str, Parameter] = Field(default={})
    """Handed to the scorer with each request. Numbers and booleans go as text: `0.5`, `true`."""
    clip: tuple[float, float] | None = None
    """[low, high] that the raw score is cut to before it is weighted."""
    curve: Curve = ()
    """[[step, factor], …], steps ascending: factors of the weight, linear in between, constant before and after."""
    gate: GatePart | None = None
    """Gate on the raw score."""
    held_out_only: bool = False
    """Score held-out samples alone; a step does not wait for it. Needs a weight of 0 and no gate."""
    on_failure: Literal["pause", "drop", "skip"] = "pause"
    """When the service has failed for `timeouts.rewards_s`, or its scores were pending for `timeouts.pending_s`: pause
    the job, drop the samples (`no_score_NAME`), or continue with the other rewards, which is recorded and counted."""

    @field_validator("clip")
    @classmethod
    def _ascending_clip(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip is not None and clip[0] >= clip[1]:
            raise ValueError(
                f"[{clip[0]:g}, {clip[1]:g}] leaves nothing: give the lower limit first, then a higher one"
            )
        return clip

    @property
    def has_influence(self) -> bool:
        """Whether its weight is other than 0 at some step."""
        return self.weight != 0 and (not self.curve or any(factor for _, factor in self.curve))

    def service_of(self, name: str) -> str:
        """The service that the reward of this name asks."""
        return self.service or name


class SchedulePart(Part):
    steps: int = Field(default=100, ge=0, le=10_000_000)
    """Training steps; each makes one new policy version (more updates may hide inside one). 0 is an evaluation: the
    job validates `data.validation` once, trains nothing and reads no `data.train` (docs/evaluation.md)."""
    save_every: int = Field(default=10, ge=1)
    """Steps between checkpoints. Samples are kept until one covers them."""
    keep_last: int = Field(default=2, ge=1)
    """Checkpoints kept."""
    keep_best: int = Field(default=0, ge=0, le=1000)
    """Checkpoints kept besides: those with the best held-out reward among the validations by the same revision of the
    rewards. One with less than half as many scored samples as another is not compared, here and by the limits below."""
    save_full: bool = False
    """Export the whole pipeline with every checkpoint of a job of full weights. LoRA jobs always export their adapter
    with it."""
    validate_every: int = Field(default=10, ge=1)
    """Steps between validations; there is one before the first step and one after the last as well."""
    validation_steps: int | None = Field(default=None, ge=2, le=1000)
    """Denoising steps of validation; unset: as in training."""
    validation_sampler: SamplerName | None = None
    """Sampler of validation; unset: `rollout.sampler`."""
    validation_height: int | None = Field(default=None, ge=16, le=8192, multiple_of=16)
    """Pixels of held-out samples; unset: `rollout.height`. A job may train on smaller ones, which are cheaper."""
    validation_width: int | None = Field(default=None, ge=16, le=8192, multiple_of=16)
    """Pixels of held-out samples; unset: `rollout.width`."""
    validation_samples: int = Field(default=1, ge=1, le=4096)
    """Samples of each held-out prompt. The first keeps its seed whatever the number."""
    max_staleness: int = Field(default=0, ge=0, le=16)
    """Policy versions a sample may be behind the step that trains on it. 0 is strictly on-policy; above it a lower
    learning rate may be needed (docs/results.md). `max_reward_drop`, if set, pauses a job that breaks."""
    max_disagreement: float | None = Field(default=None, gt=0.0)
    """The job pauses when a reward of weight 0 has lost more than this since its best validation, in standard
    deviations, and the job's reward has not (docs/results.md); unset: never. By noise alone 10 validations exceed 0.5
    in at most 1 % of jobs with 100 held-out prompts, and in 27 % with 32."""
    max_reward_drop: float | None = Field(default=None, gt=0.0)
    """The job pauses when its held-out reward has lost more than this since its best validation by the same rewards, in
    standard deviations over the held-out samples (docs/results.md); unset: never. By noise alone 10 validations exceed
    0.5 in at most 1 % of jobs with 100 held-out prompts, and in 27 % with 32. `schedule.keep_best` keeps the best
    checkpoint."""


class TimeoutPart(Part):
    """Deadlines of remote calls, seconds."""

    generate_s: Seconds = 1800.0
    """One call that samples a bundle."""
    score_s: Seconds = 300.0
    """Limit on one call to a reward service."""
    rewards_s: Seconds = 1800.0
    """A reward that fails is asked again for so long after its samples were first sent; then `on_failure` decides."""
    pending_s: Annotated[float, Field(ge=1.0, le=31_536_000.0)] = 72_000.0
    """A reward whose scores are pending, as people have yet to vote, is asked again for so long after its samples were
    first sent; then `on_failure` decides. Pictures are kept for 24 h; later ones are sampled again."""
    train_step_s: Seconds = 7200.0
    """The updates of one step."""
    publish_s: Seconds = 600.0
    """Sending new weights to all rollouts."""
    checkpoint_s: Seconds = 1800.0
    """Writing a checkpoint."""
    hang_s: Annotated[float, Field(ge=1.0, le=604_800.0)] = 120.0
    """A process that works and makes no progress for so long is killed and replaced. The working thread itself reports
    its progress; loading, compiling and checkpoints have longer limits of their own."""


class JobSpec(Part):
    """A whole job."""

    name: str = Field(default="job", pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    """Name of the job, shown next to its id."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """All randomness of the job comes from it."""
    model: ModelPart
    algorithm: AlgorithmPart = AlgorithmPart()
    rollout: RolloutPart = RolloutPart()
    rewards: dict[str, RewardPart] = Field(default={})
    """Reward name → service, weight and more (docs/rewards.md). At least one, unless nothing is scored or teachers
    train and nothing is validated; with teachers, rewards only watch."""
    trainer: TrainerPart = TrainerPart()
    data: DataPart
    schedule: SchedulePart = SchedulePart()
    timeouts: TimeoutPart = TimeoutPart()

    @field_validator("rewards")
    @classmethod
    def _plain_names(cls, rewards: dict[str, RewardPart]) -> dict[str, RewardPart]:
        for name in rewards:
            if not re.fullmatch(REWARD_NAME, name):
                raise ValueError(
                    f"rename {name!r}: a reward's name has up to 63 letters, digits, '_' and '-', a letter or digit "
                    "first; a service of another name is given as its `service`"
                )
        return rewards

    @model_validator(mode="before")
    @classmethod
    def _algorithm_defaults(cls, data: Any) -> Any:
        """Fills in what the named algorithm and its loss set and the job does not."""
        plugins.load()
        return _filled(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _combinations(self) -> JobSpec:
        for problem in combinations.problems(self):
            raise ValueError(problem)
        return self

    @property
    def method(self) -> Algorithm:
        """What the registry says of `algorithm.name`."""
        return ALGORITHMS[self.algorithm.name]

    @property
    def step(self) -> Step:
        """What the registry says of `rollout.noise.type`."""
        return STEPS[self.rollout.noise.type]

    @property
    def loss(self) -> Loss:
        """What the registry says of `algorithm.loss`."""
        return LOSSES[self.algorithm.loss]

    @property
    def records_steps(self) -> bool:
        """Whether rollouts keep the steps of the window; matching losses want the final latents alone."""
        return self.loss.kind in ("policy", "distillation") or self.loss.from_steps

    @property
    def window(self) -> Window:
        """Which denoising steps carry noise, or are begun at by a loss that follows a reward's gradient from them."""
        return self.rollout.late_window if self.loss.from_steps else self.rollout.noise_window

    @property
    def trains_on_gradients(self) -> bool:
        """Whether the trainer asks rewards for gradients."""
        return self.loss.kind == "gradient"

    @property
    def writes_tokens(self) -> bool:
        """Whether the policy writes tokens; if not, it is a flow."""
        return self.loss.kind == "sequence"

    @property
    def trainer_pool(self) -> str:
        """Pool of the trainer's ranks where they sample. No rollout can be in it: their pools have no dot."""
        return f"{self.rollout.pool}.trainer"

    @property
    def pools(self) -> tuple[str, ...]:
        """Pools whose replicas sample for the job, the trainer's own last."""
        rollouts, own = self.rollout.pool, self.trainer_pool
        return {"no": (rollouts,), "idle": (rollouts, own), "only": (own,)}[self.trainer.samples]

    @property
    def gives_way(self) -> bool:
        """Whether a request that has not begun when a new version comes is sampled under that one. Not where batches
        must be those of any other run."""
        return self.schedule.max_staleness > 0 and not self.trainer.deterministic

    @property
    def is_evaluation(self) -> bool:
        """Whether the job only validates the weights that it starts from."""
        return self.schedule.steps == 0

    @property
    def samples_old_policy(self) -> bool:
        """Whether samples come from the old policy, not from the trained one."""
        return self.loss.keeps_old_policy and self.algorithm.old_policy.samples

    @property
    def data_files(self) -> Iterator[tuple[str, str, Columns]]:
        """Setting, place and columns of each data set that the job reads."""
        for source in self.data.each:
            yield from itertools.islice(source.files(self.method.data), 1 if self.is_evaluation else 0, None)

    @property
    def held_out_per_request(self) -> int:
        """Held-out prompts of one request, all samples of each: no more rows and pixels than a batch of training has,
        unless one prompt's samples are more."""
        trained, shown = self.rollout.size, self.validation_size
        most = self.rollout.batch_size
        rows = min(most, most * trained.height * trained.width // (shown.height * shown.width))
        return max(1, rows // self.schedule.validation_samples)

    @property
    def validation_size(self) -> Size:
        """Size of held-out samples."""
        part, size = self.schedule, self.rollout.size
        return Size(part.validation_height or size.height, part.validation_width or size.width, size.num_frames)

    def teacher_of(self, source: str) -> str:
        """Name of the teacher of a source's prompts, by its name; empty for losses without teachers."""
        teachers = self.algorithm.teachers.items() if not self.loss.reads_rewards else ()
        return next((name for name, part in teachers if not part.sources or source in part.sources), "")

    @property
    def averages(self) -> bool:
        """Whether what is validated and exported is an average of the trained weights."""
        return self.trainer.ema.decay is not None

    @property
    def reward_services(self) -> tuple[str, ...]:
        """Names of the services that its rewards ask, each once, in the rewards' order."""
        return tuple(dict.fromkeys(part.service_of(name) for name, part in self.rewards.items()))

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.group_size

    @property
    def trained_per_step(self) -> int:
        """Samples of a step that are trained on, where none is dropped: all that are made in full, or
        `algorithm.best_of` of each group, or those of the pairs."""
        part, of_group = self.algorithm, self.rollout.made_of_group
        if self.loss.needs_pairs:
            of_group = 2 * part.pairs_per_group
        elif part.best_of is not None:
            of_group = min(of_group, part.best_of)
        return self.rollout.prompts_per_step * of_group

    @property
    def most_updates_per_step(self) -> int:
        """Optimizer updates of a step that has samples enough."""
        return self.trainer.updates_per_step * self.trainer.passes

    @property
    def recomputes_all(self) -> bool:
        """Whether the trainer computes the old log-probs of all samples before a step's first update."""
        part = self.algorithm
        return part.old_log_probs == "recompute" or (
            part.old_log_probs == "first_forward" and (self.trainer.passes > 1 or part.correction.needs_all_rows)
        )

    @property
    def warnings(self) -> list[str]:
        """Settings that are valid but probably not intended, one sentence each (flowfleet/job/rules/rules.py)."""
        return list(combinations.warnings(self))


def parse_job(data: dict[str, Any]) -> JobSpec:
    """Validates a job. Raises ValueError with one line a problem, each naming its setting and what to change."""
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        lines = [_explain(item, hint=number < MOST_HINTS) for number, item in enumerate(problems)]
        raise ValueError("\n".join(lines)) from None


def load_job(path: Path) -> JobSpec:
    """Reads a job file by its suffix: .toml, .yaml, .yml or .json. Raises ValueError with the reason."""
    return parse_job(read_job_file(path))


def read_job_file(path: Path) -> dict[str, Any]:
    """The raw mapping of a job file over those that it `extends`, not yet validated."""
    return read_extended(path, "a job")


def _filled(data: dict[str, Any]) -> dict[str, Any]:
    """The job's own settings over its algorithm's over its loss's; but a loss that the job itself chose goes before the
    algorithm, which was written for another. What is malformed the schema refuses later."""
    part = data.get("algorithm", {})
    if not isinstance(part, dict):
        return data
    algorithm = ALGORITHMS.get(str(part.get("name", "flow_grpo")))
    defaults: dict[str, Any] = {}
    if algorithm is not None:
        loss = LOSSES.get(str(part.get("loss", algorithm.loss)))
        by_loss = loss.settings if loss else {}
        by_algorithm = {"algorithm.loss": algorithm.loss, **algorithm.defaults}
        is_own = loss is not None and loss.name == algorithm.loss
        defaults = by_loss | by_algorithm if is_own else by_algorithm | by_loss
    filled: dict[str, Any] = data
    for name, value in defaults.items():
        filled = _with_default(filled, name.split("."), value)
    return filled


def _with_default(data: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """A copy of `data` that holds `value` at a path, unless there is something already."""
    key, *rest = path
    if not rest:
        return {key: value} | data
    inner = data.get(key, {})
    return data | {key: _with_default(inner, rest, value)} if isinstance(inner, dict) else data


def _choice(name: str, known: Mapping[str, Any]) -> str:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name!r} is not one of {', '.join(sorted(known))}{hint}")
    return name


def _explain(item: Any, *, hint: bool) -> str:
    location = [str(part) for part in item["loc"]]
    name = ".".join(location) or "job"
    if item["type"] == "extra_forbidden":
        near = reference.near(name, list(reference.settings(JobSpec))) if hint else []
        return f"{name}: unknown setting" + (f"; did you mean {' or '.join(near)}?" if near else "")
    message = str(item["msg"]).removeprefix("Value error, ")
    return message if not location else f"{name}: {message[0].lower()}{message[1:]}"
