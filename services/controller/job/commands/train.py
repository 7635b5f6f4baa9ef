"""TrainStep: update the model once."""

import asyncio
from collections.abc import Mapping
from functools import partial

from flowfleet.data.lineage import follow
from flowfleet.process.telemetry import LOG_PROB_GAP, LOG_PROB_NOT_FINITE
from services.controller.job.context import JobContext
from services.controller.job.machine import events as ev


async def train(job: JobContext, step: int) -> None:
    """Update the model once. The trainer records each step, so a repeated request changes nothing."""
    request = await job.load_train_request(step)
    request.profile = step < await job.store.jobs.profiled_before(job.job_id)
    with job.pool.updating():
        result = await job.trainer.train(request)
    is_new = step == job.machine.state.version
    if is_new:
        await job.reports.trained(request, result)
    trained = ev.Trained(
        step=step,
        log_prob_gap=result.metrics.get(LOG_PROB_GAP),
        log_prob_not_finite=result.metrics.get(LOG_PROB_NOT_FINITE, 0.0),
        taught_nothing=taught_nothing(result.metrics),
        lineage=await asyncio.to_thread(follow, dict(job.machine.state.history), request),
    )
    hold = partial(job.store.jobs.hold, job.job_id) if job.machine.too_far(trained) else None
    await job.emit(trained, also=hold)
    if is_new:
        await job.pictures.end(min(step, job.reports.first_offered - 1))


def taught_nothing(metrics: Mapping[str, float]) -> bool:
    """True if every update was skipped for its gradient, but for a loss scale of float16 that is still sought: then
    the loss itself is finite. Metrics that are not finite are left out."""
    is_sought = "actor/loss" in metrics and "actor/loss_scale" in metrics
    return metrics.get("actor/skipped_updates", 0.0) > 0 and "actor/grad_norm" not in metrics and not is_sought
