"""ComputeAdvantages: compare each sample with its group and store the request to train."""

import asyncio
from functools import partial
from typing import Final

from flowfleet.job.drop_reasons import DropReason
from services.controller.job import requests
from services.controller.job.context import JobContext
from services.controller.job.machine import events as ev
from services.controller.job.machine.batch import Batch
from services.controller.job.reporting.figures import weighed

WARNED_SHARE: Final = 0.1
PAUSED_SHARE: Final = 0.5
"""Shares of a step's samples that one reward gives no score."""


async def advantages(job: JobContext, step: int) -> None:
    """Compute how much better each sample is than its group, and store the request for the trainer.

    Without pairs that differ the request is empty: the trainer counts the step and learns nothing. A step without
    any score, or to more than half of which a reward gave none, pauses the job first; resumed, it trains on the rest.
    """
    batch, rewards = job.machine.state.batches[step], job.machine.training_rewards_at(step)
    causes = job.machine.state.drop_causes
    if warning := drop_warning(step, batch, causes):
        await job.store.jobs.update_progress(job.job_id, warning=warning, drop_causes=causes)
    if not batch.accepted and (reason := pause_reason(step, batch, warning)):
        await job.emit(ev.PauseRequested(reason=reason, step=step), also=partial(job.store.jobs.hold, job.job_id))
        return
    credits, figures, spread = await asyncio.to_thread(weighed, job.spec, rewards, batch)
    request = await requests.train_step(job, step, credits)
    ready = ev.AdvantagesReady(step=step, num_samples=len(credits), figures=figures, spread=spread)
    await job.emit(ready, also=partial(job.refs.put_request, request))


def drop_warning(step: int, batch: Batch, causes: dict[str, str]) -> str:
    """Names the reward that gave more than a tenth of the step's samples no score; "" without one."""
    reward, number, made = batch.most_dropped()
    if number <= WARNED_SHARE * made:
        return ""
    cause = causes.get(DropReason.NO_SCORE.of(reward), "")
    return f"step {step}: rewards.{reward} gave no score for {number} of {made} samples" + f" ({cause})" * bool(cause)


def pause_reason(step: int, batch: Batch, warning: str) -> str:
    """Why the job pauses before it trains on the step; "" where it does not."""
    reward, number, made = batch.most_dropped()
    if batch.has("scored") and number <= PAUSED_SHARE * made:
        return ""
    if not batch.is_judged:
        repair = "No sample could be made: the job's events `gave_up` say why. Fix the model or the rollouts,"
    else:
        name = reward or "NAME"
        repair = f"Fix the rewards, score the step again (`flowfleet rewards set ID {name} --open-steps`),"
    if batch.has("scored"):
        return f"{warning}. {repair} and resume the job: else it trains on the samples that have scores"
    why = warning.partition(": ")[2] or "samples_dropped has the reasons"
    nothing = f"step {step}: no sample has a score, so there is nothing to learn from it: {why}"
    return f"{nothing}. {repair} and resume the job: else it continues with the next step"
