"""Select-then-train: a group's samples are made cheaply first, and scored; its extremes alone are made again, exactly.

    wanted: all of the group ──preview──► preliminary totals ──► the middle is dropped, as `not_selected`
                                                             └─► the best and the worst stay wanted: sampled, scored,
                                                                 trained on like any others

Previews have the seeds of the samples that they stand for and never reach the trainer. The choice is one event a
dropped sample, all of a group in one transaction of the ledger, so that it is made once. A controller that is killed
before it makes the same previews again, from the same seeds and weights.
"""

import asyncio
from collections.abc import Mapping, Sequence

from flowfleet.data.blobs import discard
from flowfleet.errors import FlowfleetError
from flowfleet.job.drop_reasons import DropReason
from flowfleet.proto import common_pb2
from services.controller.job import requests
from services.controller.job.commands.drawing import draw
from services.controller.job.context import JobContext
from services.controller.job.credit import Credit, best_and_worst
from services.controller.job.machine import events as ev
from services.controller.job.machine.batch import SampleState
from services.controller.rewards.job_rewards import SampleScore
from services.controller.waiting import NotYet

Place = tuple[int, int]
"""Training step and group."""


class Previews:
    """Previews of one job. Remembers those whose rewards have failed so far, so that they are not made again."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._drawn: dict[Place, list[common_pb2.Sample]] = {}

    async def choose(self, step: int, groups: Sequence[int]) -> None:
        """Drops what previews say not to make, of those groups where the choice is still to be made. Remote errors pass
        through; RewardFailure and RewardPause as in `Scoring.score`."""
        keep, batch = self._job.spec.rollout.preview.keep, self._job.machine.state.batches.get(step)
        if keep is None or batch is None:
            return
        due = [group for group in groups if is_due(batch.groups[group], keep)]
        await self._draw(step, [group for group in due if (step, group) not in self._drawn])
        facts = await asyncio.gather(*(self._verdicts(step, group, keep) for group in due), return_exceptions=True)
        for fact in facts:
            if isinstance(fact, BaseException):
                raise fact
        await self._job.emit(*(one for fact in facts if not isinstance(fact, BaseException) for one in fact))
        for group in due:
            await discard(self._job.blobs, [sample.media for sample in self._drawn.pop((step, group), ())])

    async def _draw(self, step: int, groups: Sequence[int]) -> None:
        job = self._job
        if not groups:
            return
        wanted = {group: job.machine.wanted(step, group) for group in groups}
        request, prompts = requests.preview(job, step, wanted), job.prompts(step)
        oldest = max(0, step - job.spec.schedule.max_staleness)
        samples = await draw(job, request, [prompts[group.group] for group in request.groups], oldest, step)
        for group in groups:
            own = [sample for sample in samples if sample.id.group == group]
            if [sample.id.index for sample in own] != wanted[group]:
                raise NotYet(f"group {group} of step {step} got {len(own)} of {len(wanted[group])} previews")
            self._drawn[step, group] = own

    async def _verdicts(self, step: int, group: int, keep: int) -> list[ev.Dropped]:
        """Scores a group's previews; returns those that are dropped."""
        job, samples = self._job, self._drawn[step, group]
        prompt = job.prompts(step)[group]
        try:
            verdicts = await job.scoring.score(samples, [prompt] * len(samples), job.rewards(prompt, step), step)
        except FlowfleetError:  # of the blob store, where previews may have been for too long
            del self._drawn[step, group]
            raise
        found = {sample.id.index: verdict for sample, verdict in zip(samples, verdicts, strict=True)}
        return [
            ev.Dropped(step=step, group=group, index=i, reason=reason, cause=found[i].cause, refill=False)
            for i, reason in not_selected(group, found, keep).items()
        ]


def is_due(samples: Mapping[int, SampleState], keep: int) -> bool:
    """True if samples of a group, by index, are still to be selected: it has more than it keeps. Dropped ones do not
    count, so that the ledger's state alone says so."""
    return sum(sample.status != "dropped" for sample in samples.values()) > keep


def not_selected(group: int, verdicts: Mapping[int, SampleScore], keep: int) -> dict[int, str]:
    """Index to reason of what is not made, by the verdicts on a group's previews: what has no total by its own reason,
    and the middle of the others, as `best_and_worst` has it."""
    totals = {index: verdict.score for index, verdict in verdicts.items()}
    credits = [Credit(group, index, total, total) for index, total in totals.items() if total is not None]
    kept = {credit.index for credit in best_and_worst(credits, [credit.reward for credit in credits], keep)}
    return {
        index: str(DropReason.NOT_SELECTED) if verdict.score is not None else verdict.reason
        for index, verdict in sorted(verdicts.items())
        if index not in kept
    }
