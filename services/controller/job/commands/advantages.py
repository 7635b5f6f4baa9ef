"""ComputeAdvantages: compare each sample with its group and store the request to train."""

from __future__ import annotations

import asyncio
from typing import Any

from services.controller.job import requests
from services.controller.job.context import JobContext
from services.controller.job.machine import events as ev
from services.controller.job.reporting.figures import weighed


async def advantages(job: JobContext, step: int) -> None:
    """Compute how much better each sample is than its group, and store the request for the trainer.

    Without pairs that differ the request is empty: the trainer counts the step and learns nothing. A step without
    any score gives an empty request too, and pauses the job."""
    batch, rewards = job.machine.state.batches[step], job.machine.training_rewards_at(step)
    credits, figures, spread = await asyncio.to_thread(weighed, job.spec, rewards, batch)
    request = await requests.train_step(job, step, credits)
    ready = ev.AdvantagesReady(step=step, num_samples=len(credits), figures=figures, spread=spread)
    facts: list[ev.Event] = [ready]
    if is_empty := not batch.has("scored"):
        facts.append(ev.PauseRequested(reason=_nothing_to_learn(step, was_sampled=batch.is_judged)))

    async def also(pipe: Any) -> None:
        await job.refs.put_request(request, pipe)
        if is_empty:
            await job.store.jobs.hold(job.job_id, pipe)

    await job.emit(*facts, also=also)


def _nothing_to_learn(step: int, *, was_sampled: bool) -> str:
    repair = (
        "Fix the reward services, or change them with `flowfleet rewards`,"
        if was_sampled
        else "No sample could be made: the job's events `gave_up` say why. Fix the model or the rollouts,"
    )
    return (
        f"step {step}: no sample has a score, so there is nothing to learn from it; samples_dropped has the reasons. "
        f"{repair} and resume the job: it continues with the next step"
    )
