"""How long a job runs, what it keeps, and how long it waits: `[schedule]`, `[pause]` and `[timeouts]`."""

from typing import Annotated

from pydantic import Field

from flowfleet.algorithms.samplers import SamplerName
from flowfleet.job.part import Part

Seconds = Annotated[float, Field(ge=0.1, le=604_800.0)]
"""A deadline: from a tenth of a second to a week."""


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
    keep_pictures: int = Field(default=200, ge=0, le=100_000)
    """Pictures of training samples that stay for 24 h after their step: so many of the newest, and of the best by the
    total and by each reward. The others are deleted."""
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


class PausePart(Part):
    release_s: Annotated[float, Field(ge=0.0, le=31_536_000.0)] = 120.0
    """Seconds after which a paused job is saved, and its trainer's devices go to other jobs. Resumed later it waits for
    devices in the queue."""


class TimeoutPart(Part):
    """Deadlines of remote calls, seconds."""

    generate_s: Seconds = 1800.0
    """A call that samples a bundle."""
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
    """A process that makes no progress at work, or gives no sign at all, for so long is killed and replaced. Its
    working thread reports its progress, for which loading, compiling and checkpoints have limits of their own."""
