"""The job file: what a user writes in TOML, YAML or JSON, and what every process gets.

One schema for all three formats. Unknown keys fail and name the nearest valid one; a combination that cannot work
fails here, at submit, with the setting to change. The parts are in modules of their own, and importable from here.
This module is free of torch: the controller has none.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator

from flowfleet import plugins
from flowfleet.algorithms.builtin.policy import FlowGrpoSettings
from flowfleet.algorithms.registry import ALGORITHMS, LOSSES, STEPS, Algorithm, Loss, Step
from flowfleet.algorithms.settings import (
    AdvantageSettings,
    CorrectionPart,
    KlSettings,
    LossSettings,
    OldPolicyPart,
    PairSettings,
    RatioSettings,
    TeacherPart,
    TeacherSettings,
)
from flowfleet.algorithms.windows import Window, WindowPart
from flowfleet.api.jobs import Priority
from flowfleet.job import reference
from flowfleet.job.algorithm import AlgorithmTable, filled, loss_of
from flowfleet.job.data import DataPart
from flowfleet.job.migration import is_first_format, migrated
from flowfleet.job.part import NAMES, Part
from flowfleet.job.removed import replacement
from flowfleet.job.rewards import REWARD_NAME, GatePart, RewardPart
from flowfleet.job.rules import rules as combinations
from flowfleet.job.sampling import NoisePart, PreviewPart, RolloutPart
from flowfleet.job.schedule import PausePart, SchedulePart, TimeoutPart
from flowfleet.job.setting_files import read_extended
from flowfleet.job.training import EmaPart, LoraPart, OptimizerPart, TrainerPart
from flowfleet.models.settings import Size
from flowfleet.part import in_words, rule
from flowfleet.prompts.columns import Columns

__all__ = [
    "REWARD_NAME",
    "AlgorithmPart",
    "CorrectionPart",
    "DataPart",
    "EmaPart",
    "GatePart",
    "JobSpec",
    "LoraPart",
    "ModelPart",
    "NoisePart",
    "OldPolicyPart",
    "OptimizerPart",
    "Part",
    "PreviewPart",
    "RewardPart",
    "RolloutPart",
    "SchedulePart",
    "TeacherPart",
    "TimeoutPart",
    "TrainerPart",
    "WindowPart",
    "load_job",
    "parse_job",
    "read_job_file",
]

MOST_HINTS = 20
"""Unknown settings for which names that are like theirs are looked up."""
AlgorithmPart = FlowGrpoSettings
"""Settings of the default loss."""


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


class JobSpec(Part):
    """A whole job."""

    name: str = Field(default="job", pattern=rule(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", NAMES.format(63)))
    """Name of the job, shown next to its id."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Source of all randomness of the job."""
    priority: Priority = "normal"
    """How fast the job moves forward in the queue: of the seconds that it has waited, `low` counts each once, `normal`
    4 times, `high` 16 times."""
    model: ModelPart
    algorithm: Annotated[SerializeAsAny[LossSettings], AlgorithmTable] = FlowGrpoSettings()
    """Settings of the job's loss."""
    rollout: RolloutPart = RolloutPart()
    rewards: dict[str, RewardPart] = Field(default={})
    """Reward name → service, weight and more (docs/rewards.md). At least one, unless nothing is scored or teachers
    train and nothing is validated; with teachers, rewards only watch."""
    trainer: TrainerPart = TrainerPart()
    data: DataPart
    schedule: SchedulePart = SchedulePart()
    pause: PausePart = PausePart()
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
        """Fills in what the named algorithm and its loss set and the job does not; takes jobs of format 0 as well."""
        plugins.load()
        if is_first_format(data):
            data, reasons = migrated(data)
            for reason in reasons:
                raise ValueError(reason)
        return filled(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _combinations(self) -> JobSpec:
        for problem in combinations.problems(self):
            raise ValueError(problem)
        return self

    @property
    def method(self) -> Algorithm:
        """The registry's entry of `algorithm.name`."""
        return ALGORITHMS[self.algorithm.name]

    @property
    def step(self) -> Step:
        """The registry's entry of `rollout.noise.type`."""
        return STEPS[self.rollout.noise.type]

    @property
    def loss(self) -> Loss:
        """The registry's entry of `algorithm.loss`."""
        return LOSSES[self.algorithm.loss]

    @property
    def kl(self) -> KlSettings:
        """The distance to the model before training, where the loss has one."""
        return self.algorithm.of(KlSettings)

    @property
    def records_steps(self) -> bool:
        """True where rollouts keep the steps of the window; matching losses want the final latents alone."""
        return self.loss.traits.samples == "steps" or self.loss.from_steps

    @property
    def window(self) -> Window:
        """Which denoising steps carry noise, or are begun at by a loss that follows a reward's gradient from them."""
        return self.rollout.late_window if self.loss.from_steps else self.rollout.noise_window

    @property
    def trains_on_gradients(self) -> bool:
        """True where the trainer asks rewards for gradients."""
        return self.loss.traits.follows_gradients

    @property
    def writes_tokens(self) -> bool:
        """True where the policy writes tokens; else it is a flow."""
        return self.loss.traits.writes_tokens

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
        """True where a request that has not begun when a new version comes is sampled under that one. Not where batches
        must be those of any other run."""
        return self.schedule.max_staleness > 0 and not self.trainer.deterministic

    @property
    def is_evaluation(self) -> bool:
        """True where the job only validates the weights that it starts from."""
        return self.schedule.steps == 0

    @property
    def samples_old_policy(self) -> bool:
        """True where samples come from the old policy, not from the trained one."""
        return self.loss.keeps_old_policy and self.loss.old_policy_samples

    @property
    def data_files(self) -> Iterator[tuple[str, str, Columns]]:
        """Setting, place and columns of each data set that the job reads."""
        for source in self.data.each:
            yield from itertools.islice(source.files(self.method.data), 1 if self.is_evaluation else 0, None)

    @property
    def groups_per_request(self) -> int:
        """Groups of a request: whole ones up to `rollout.batch_size` rows, or one where each has a size of its own."""
        return 1 if self.data.size_column else max(1, self.rollout.batch_size // self.rollout.group_size)

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
        return replace(size, height=part.validation_height or size.height, width=part.validation_width or size.width)

    @property
    def teachers(self) -> dict[str, TeacherPart]:
        """Teachers by name; none for a loss without."""
        return self.algorithm.of(TeacherSettings).teachers

    def teacher_of(self, source: str) -> str:
        """Name of the teacher of a source's prompts, by its name; empty for losses without teachers."""
        return next((name for name, part in self.teachers.items() if not part.sources or source in part.sources), "")

    @property
    def averages(self) -> bool:
        """True where the validated and exported weights are an average of the trained ones."""
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
        of_group, best_of = self.rollout.made_of_group, self.algorithm.of(AdvantageSettings).best_of
        if self.loss.needs_pairs:
            of_group = 2 * self.algorithm.of(PairSettings).pairs_per_group
        elif best_of is not None:
            of_group = min(of_group, best_of)
        return self.rollout.prompts_per_step * of_group

    @property
    def most_updates_per_step(self) -> int:
        """Optimizer updates of a step that has samples enough."""
        return self.trainer.updates_per_step * self.trainer.passes

    @property
    def recomputes_all(self) -> bool:
        """True where the trainer computes the old log-probs of all samples before a step's first update."""
        part = self.algorithm.of(RatioSettings)
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
        loss = loss_of(data)
        lines = [_explain(item, loss, hint=number < MOST_HINTS) for number, item in enumerate(problems)]
        raise ValueError("\n".join(lines)) from None


def load_job(path: Path) -> JobSpec:
    """Reads a job file by its suffix: .toml, .yaml, .yml or .json. Raises ValueError with the reason."""
    return parse_job(read_job_file(path))


def read_job_file(path: Path) -> dict[str, Any]:
    """The raw mapping of a job file over those that it `extends`, not yet validated."""
    return read_extended(path, "a job")


def _explain(item: Any, loss: Loss, *, hint: bool) -> str:
    location = [str(part) for part in item["loc"]]
    name = ".".join(location) or "job"
    if item["type"] == "extra_forbidden":
        return _unknown(name, loss, hint=hint)
    message = in_words(item)
    return message if not location else f"{name}: {message[0].lower()}{message[1:]}"


def _unknown(name: str, loss: Loss, *, hint: bool) -> str:
    """Says what to write in place of a setting that the job does not have."""
    if advice := replacement(name):
        return f"{name} was removed: {advice}"
    if readers := reference.readers(name, writes_tokens=loss.traits.writes_tokens):
        return f"{name} has no effect with algorithm.loss = {loss.name}: leave it out, or use {', '.join(readers)}"
    near = reference.near(name, list(reference.settings(JobSpec, loss=loss))) if hint else []
    return f"{name}: unknown setting" + (f"; did you mean {' or '.join(near)}?" if near else "")
