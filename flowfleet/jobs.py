"""The job file: what a user writes in TOML, YAML or JSON, and what every process gets.

One schema for all three formats. Unknown keys fail and name the nearest valid one; a combination that cannot work
fails here, at submit, with the setting to change. This module is free of torch: the controller has none.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

StepType = Literal["sde", "cps"]
WindowStrategy = Literal["fixed", "random", "progressive", "all"]

QWEN_LORA_TARGETS = (
    "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
)  # fmt: skip


class Part(BaseModel):
    """Base of every part of a job: strict, frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelPart(Part):
    path: str = Field(min_length=1)
    """Directory of a diffusers pipeline, readable by rollouts and trainer."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the weights while sampling and of the forward pass while training. Latents stay fp32."""


class NoisePart(Part):
    """The reverse step with noise of Flow-GRPO (`sde`) or of CPS (`cps`)."""

    type: StepType = "sde"
    eta: float = Field(default=0.7, ge=0.0, le=4.0)
    """Noise level. 0 is the ODE."""
    share_initial_noise: bool = False
    """One initial latent for all samples of a group (DanceGRPO)."""


class WindowPart(Part):
    """Denoising steps at which noise enters and which are trained. One window a step, shared by all groups."""

    strategy: WindowStrategy = "random"
    size: int = Field(default=2, ge=1, le=1000)
    """Number of steps with noise."""
    low: int = Field(default=0, ge=0)
    """First step that may carry noise."""
    high: int | None = Field(default=None, ge=1)
    """End (exclusive) of the steps that may carry noise; unset: all but the last."""


class RolloutPart(Part):
    prompts_per_step: int = Field(default=32, ge=1, le=65_536)
    group_size: int = Field(default=16, ge=1, le=4096)
    """Samples of one prompt, scored against each other."""
    height: int = Field(default=512, ge=16, le=8192, multiple_of=16)
    """Pixels."""
    width: int = Field(default=512, ge=16, le=8192, multiple_of=16)
    """Pixels."""
    num_inference_steps: int = Field(default=10, ge=2, le=1000)
    guidance_scale: float = Field(default=1.0, ge=1.0, le=100.0)
    """True classifier-free guidance; 1 is off and halves the work."""
    negative_prompt: str = " "
    batch_size: int = Field(default=16, ge=1, le=4096)
    """Rows of one Generate call: whole groups are packed up to it."""
    noise: NoisePart = NoisePart()
    window: WindowPart = WindowPart()
    on_drop: Literal["count", "refill"] = "refill"
    """A sample that could not be scored: ask for another of its group, or train on fewer and count it."""
    max_refills: int = Field(default=2, ge=0, le=100)
    """Replacements a group may ask for in one step."""


class AlgorithmPart(Part):
    name: Literal["flow_grpo"] = "flow_grpo"
    clip_range: float = Field(default=1e-5, gt=0.0, lt=1.0)
    """Of the ratio of mean log-probs a latent element."""
    clip_nats: float | None = Field(default=None, gt=0.0)
    """The same limit in nats of the joint ratio; replaces `clip_range` and serves every resolution."""
    advantage_std: Literal["global", "group", "none"] = "global"
    """Divide centred rewards by the std (ddof 0) of the batch, of the group, or not at all."""
    advantage_clamp: float = Field(default=5.0, gt=0.0)
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference (the model before training). Needs `trainer.mode = "lora"`."""
    old_log_probs: Literal["first_forward", "recompute", "rollout"] = "first_forward"
    """Where the old log-probs come from: the update's own first forward where that is exact (else recomputed), always
    recomputed before the update, or the rollout's own (bypass; needs `importance_cap`)."""
    importance_cap: float | None = Field(default=None, gt=0.0)
    """Truncated importance sampling against the rollout's own log-probs, at most this weight."""


class LoraPart(Part):
    rank: int = Field(default=64, ge=1, le=4096)
    alpha: float = Field(default=128.0, gt=0.0)
    target_modules: tuple[str, ...] = QWEN_LORA_TARGETS


class OptimizerPart(Part):
    """AdamW."""

    lr: float = Field(default=3e-4, gt=0.0, lt=1.0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=1e-4, ge=0.0)
    max_grad_norm: float = Field(default=1.0, gt=0.0)


class TrainerPart(Part):
    mode: Literal["lora", "full"] = "lora"
    lora: LoraPart = LoraPart()
    optimizer: OptimizerPart = OptimizerPart()
    world_size: int = Field(default=1, ge=1, le=4096)
    """Ranks of torchrun, one an accelerator."""
    updates_per_step: int = Field(default=1, ge=1, le=64)
    """Optimizer updates a step; the samples of the step are split among them."""
    micro_batch_size: int = Field(default=16, ge=1, le=4096)
    """Rows of one forward and backward on one rank."""
    gradient_checkpointing: bool = False
    deterministic: bool = False
    """Keep the rollout's batches and their order, so that log-probs are recomputed bit for bit."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads a rank; unset: all cores shared by the ranks."""


class RewardPart(Part):
    weight: float = 1.0
    params: dict[str, str] = {}
    """Handed to the scorer with each request."""


class DataPart(Part):
    train: str = Field(min_length=1)
    """Prompt file, readable by the controller: .txt (one a line) or .jsonl ({"prompt": …, "metadata": {…}})."""
    validation: str | None = None
    """Held-out prompts. Unset: no validation."""


class SchedulePart(Part):
    steps: int = Field(default=100, ge=1, le=10_000_000)
    """Training steps; each makes one new policy version (more updates may hide inside one)."""
    save_every: int = Field(default=10, ge=1)
    """Steps between checkpoints. Samples are kept until one covers them."""
    keep_last: int = Field(default=2, ge=1)
    """Checkpoints kept."""
    validate_every: int = Field(default=10, ge=1)
    """Steps between validations; there is one before the first step and one after the last as well."""
    validation_steps: int | None = Field(default=None, ge=1, le=1000)
    """Denoising steps of validation; unset: as in training."""
    max_staleness: int = Field(default=0, ge=0, le=16)
    """Policy versions a sample may be behind the step that trains on it. 0 is strictly on-policy."""


class TimeoutPart(Part):
    """Deadlines of remote calls, seconds."""

    generate_s: float = Field(default=1800.0, gt=0.0)
    score_s: float = Field(default=300.0, gt=0.0)
    train_step_s: float = Field(default=7200.0, gt=0.0)
    publish_s: float = Field(default=600.0, gt=0.0)
    checkpoint_s: float = Field(default=1800.0, gt=0.0)


class JobSpec(Part):
    """A whole job."""

    name: str = Field(default="job", pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    seed: int = Field(default=1, ge=0, lt=2**63)
    """All randomness of the job comes from it."""
    model: ModelPart
    algorithm: AlgorithmPart = AlgorithmPart()
    rollout: RolloutPart = RolloutPart()
    rewards: Annotated[dict[str, RewardPart], Field(min_length=1)]
    """Reward service name → weight and parameters."""
    trainer: TrainerPart = TrainerPart()
    data: DataPart
    schedule: SchedulePart = SchedulePart()
    timeouts: TimeoutPart = TimeoutPart()

    @model_validator(mode="after")
    def _combinations(self) -> JobSpec:
        rollout, window = self.rollout, self.rollout.window
        high = max(1, rollout.num_inference_steps - 1) if window.high is None else window.high
        if high > rollout.num_inference_steps:
            raise ValueError(
                f"rollout.window.high = {high} lies beyond rollout.num_inference_steps = {rollout.num_inference_steps}"
            )
        if window.strategy != "all" and window.low + window.size > high:
            raise ValueError(
                f"rollout.window: size {window.size} does not fit into steps {window.low}…{high - 1}; lower "
                "rollout.window.size or widen rollout.window.low and .high"
            )
        last = rollout.num_inference_steps - 1
        if rollout.noise.type == "cps" and rollout.noise.eta > 1:
            raise ValueError(f"rollout.noise.eta = {rollout.noise.eta}: cps takes at most 1, all of a step's noise")
        if rollout.noise.type == "cps" and high > last:
            raise ValueError(
                f"rollout.window.high = {high}: the last step ends at sigma 0, where cps adds no noise and teaches "
                f"nothing; set rollout.window.high to at most {last}"
            )
        if rollout.noise.eta == 0:
            raise ValueError("rollout.noise.eta = 0 samples an ODE, which has no log-prob: give flow_grpo an eta > 0")
        if not all(math.isfinite(reward.weight) for reward in self.rewards.values()):
            raise ValueError("rewards.*.weight must be finite")
        if self.algorithm.kl_coef > 0 and self.trainer.mode != "lora":
            raise ValueError('algorithm.kl_coef > 0 needs trainer.mode = "lora": the adapter off is the reference')
        if self.algorithm.old_log_probs == "rollout" and self.algorithm.importance_cap is None:
            raise ValueError('algorithm.old_log_probs = "rollout" needs algorithm.importance_cap (2.0 is common)')
        if self.samples_per_step < self.trainer.updates_per_step:
            raise ValueError(
                f"trainer.updates_per_step = {self.trainer.updates_per_step} is more than the {self.samples_per_step} "
                "samples of a step; lower it or raise rollout.prompts_per_step"
            )
        return self

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.group_size


def parse_job(data: dict[str, Any]) -> JobSpec:
    """Validates a job. Raises ValueError with one line a problem, each naming its setting and what to change."""
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(item) for item in error.errors(include_url=False))) from None


def load_job(path: Path) -> JobSpec:
    """Reads a job file by its suffix: .toml, .yaml, .yml or .json. Raises ValueError with the reason."""
    return parse_job(read_job_file(path))


def read_job_file(path: Path) -> dict[str, Any]:
    """The raw mapping of a job file, not yet validated."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    readers: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".json": json.loads,
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
    }
    if path.suffix not in readers:
        raise ValueError(f"{path}: a job file ends in {', '.join(readers)}")
    try:
        data = readers[path.suffix](text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: a job is a table of settings, not {type(data).__name__}")
    return data


def _explain(item: Any) -> str:
    location = [str(part) for part in item["loc"]]
    name = ".".join(location) or "job"
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(location[-1], _fields_at(location[:-1]), n=1, cutoff=0.5)
        hint = f"; did you mean {'.'.join([*location[:-1], near[0]])}?" if near else ""
        return f"{name}: unknown setting{hint}"
    message = str(item["msg"]).removeprefix("Value error, ")
    return message if not location else f"{name}: {message[0].lower()}{message[1:]}"


def _fields_at(location: list[str]) -> list[str]:
    """Valid keys of the part at a location; tables keyed by name (rewards) take the part of any of their values."""
    part: type[BaseModel] = JobSpec
    names = iter(location)
    for name in names:
        if part is JobSpec and name == "rewards":
            next(names, None)
            part = RewardPart
            continue
        annotation = part.model_fields[name].annotation if name in part.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        part = annotation
    return list(part.model_fields)
