"""Steps that a job pauses after: rollout and trainer disagree (`rollout.max_log_prob_gap`), or it taught nothing."""

from collections.abc import Iterator

from flowfleet.algorithms.settings import RatioSettings
from flowfleet.job.spec import JobSpec
from services.controller.job.machine.events import Trained


def is_in_vain(trained: Trained) -> bool:
    """True if a whole step's gradients or log-probs are not finite, whatever the job's limit."""
    return trained.taught_nothing or trained.log_prob_not_finite >= 1


def is_above(spec: JobSpec, trained: Trained) -> bool:
    """True if a step's gap is above the job's limit, or not finite in some rows. Never without a limit, or for a loss
    without gap."""
    limit, gap = spec.rollout.max_log_prob_gap, trained.log_prob_gap
    if limit is None:
        return False
    return trained.log_prob_not_finite > 0 or (gap is not None and not gap <= limit)


def reason(spec: JobSpec, trained: Trained) -> str:
    """Reason for the user: which setting, what was measured, and what to do."""
    if is_in_vain(trained):
        what = "gradient of any update" if trained.taught_nothing else "log-prob of any row"
        return (
            f"step {trained.step}: no {what} is finite, so the job learns nothing: check the model's weights, the "
            "adapter and what model.dtype can hold; resume the job to continue unchanged, or submit another"
        )
    if trained.log_prob_not_finite > 0:
        return (
            f"step {trained.step}: log-prob of the trainer - log-prob of the rollout is NaN or infinite in "
            f"{trained.log_prob_not_finite:.2%} of the rows, which rollout.max_log_prob_gap = "
            f"{spec.rollout.max_log_prob_gap:.2e} does not allow: a model computes NaN or infinity; resume the job to "
            "continue unchanged, or submit it again with other settings of rollout and trainer"
        )
    return (
        f"step {trained.step}: the mean |log-prob of the trainer - log-prob of the rollout| is "
        f"{trained.log_prob_gap:.2e}, above rollout.max_log_prob_gap = {spec.rollout.max_log_prob_gap:.2e}; resume the "
        f"job to continue unchanged, or submit it again with {' or '.join(_remedies(spec))}"
    )


def _remedies(spec: JobSpec) -> Iterator[str]:
    """Settings that make the gap smaller, or that bear it."""
    if spec.rollout.quantization != spec.trainer.quantization:
        yield f'rollout.quantization = "{spec.trainer.quantization}"'
    if spec.rollout.adapter != "separate":
        yield 'rollout.adapter = "separate"'
    if spec.model.base != "plain":
        yield 'model.base = "plain"'
    part = spec.algorithm.of(RatioSettings)
    if part.old_log_probs == "rollout":
        yield 'algorithm.old_log_probs = "recompute"'
    elif part.correction.mode == "none":
        yield "algorithm.correction"
    yield "a higher limit"
