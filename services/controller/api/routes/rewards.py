"""REST: the current, requested and former rewards of a job, and how its shadows compare."""

import asyncio
from collections.abc import Mapping

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry

from flowfleet.api.jobs import JobStatus
from flowfleet.api.rewards import RewardRevision, Rewards, ShadowComparison
from flowfleet.errors import Conflict
from flowfleet.job.spec import JobSpec, RewardPart
from flowfleet.part import parsed
from flowfleet.rewards.changes import RewardChange, RewardSet, changed
from services.controller.api.body import read_object
from services.controller.api.dependencies import JobId, Services, Use
from services.controller.fleet.directory import Directory
from services.controller.job.shadow_queue import pair_of
from services.controller.jobs.submission.problems import InvalidJob
from services.controller.prompts.sources import Sources
from services.controller.rewards.client import RewardService
from services.controller.rewards.failures import RewardFailure
from services.controller.rewards.gradients import trains_on
from services.controller.rewards.job_rewards import modality_of
from services.controller.rewards.metrics import RewardCalls
from services.controller.rewards.trials import refusals
from services.controller.store.records import JobRecord, reward_set
from services.controller.store.rewards import check_changeable, stale

MAX_REVISIONS = 1000
"""Maximum number of a job's revisions: all of them are kept and shown."""

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["rewards"])


@router.get("/rewards")
async def show_rewards(job_id: JobId, use: Use) -> Rewards:
    return await _view(use, (await use.store.jobs.get(job_id)).checked())


@router.patch("/rewards", status_code=202)
async def change_rewards(request: Request, job_id: JobId, use: Use) -> Rewards:
    """Sets, shadows, promotes and removes rewards, from the first step on that is not open yet. A change that is
    refused changes nothing; one that is sent again is done once."""
    try:
        change = parsed(RewardChange, await read_object(request))
    except ValueError as error:
        raise InvalidJob(str(error).split("\n")) from None
    record = (await use.store.jobs.get(job_id)).checked()
    if not _is_repeated(record.rewards.newest, change):
        await use.store.rewards.change(job_id, await _revision(use, record, change))
        await use.runner.notify()
    return await _view(use, (await use.store.jobs.get(job_id)).checked())


def _is_repeated(newest: RewardRevision, change: RewardChange) -> bool:
    """True if the newest revision came from this very change, whose answer was lost."""
    lines = change.describe()
    return newest.number == change.revision + 1 and bool(lines) and newest.changes[-len(lines) :] == lines


async def _revision(use: Services, record: JobRecord, change: RewardChange) -> RewardRevision:
    """Raises InvalidJob (422) for a change that cannot be, Conflict (409) for one that cannot be now."""
    check_changeable(record.id, record.status.encode(), record.desired.encode())
    is_paused = record.status is JobStatus.PAUSED  # perhaps for what it could not validate with
    if record.progress.steps and record.progress.step >= record.progress.steps and not is_paused:
        raise Conflict("all steps of the job are trained: a change of rewards would have no effect")
    if change.open_steps and not is_paused:
        raise Conflict("open_steps: the job is at work: pause it, wait until it is paused, and send the change again")
    if change.revision != record.rewards.revision:
        raise stale(change.revision, record.rewards.revision)
    if change.revision >= MAX_REVISIONS:
        raise InvalidJob([f"revision: a job has at most {MAX_REVISIONS} revisions of its rewards: submit it again"])
    spec, before = record.job_spec(), reward_set(record.rewards.newest)
    try:
        after = changed(spec, before, change)
    except ValueError as error:
        raise InvalidJob(str(error).split("\n")) from None
    await _check_services(spec, before, after, use.directory, use.sources)
    pending = record.rewards.pending
    return RewardRevision(
        number=change.revision + 1,
        open_steps=change.open_steps or (pending is not None and pending.open_steps),
        changes=[*(pending.changes if pending else ()), *change.describe()],
        rewards={name: part.model_dump(mode="json") for name, part in after.rewards.items()},
        shadows={name: part.model_dump(mode="json") for name, part in after.shadows.items()},
    )


async def _check_services(
    spec: JobSpec, before: RewardSet, after: RewardSet, directory: Directory, sources: Sources
) -> None:
    """Checks that new rewards are known, answer and take their params, so that no step waits for them. A shadow, for
    which none waits, may be without replicas for now."""
    shadows = {name: part.as_reward() for name, part in after.shadows.items()}
    known_shadows = {name: part.as_reward() for name, part in before.shadows.items()}
    fresh = [
        (name, part, kind)
        for kind, parts, known in (("rewards", after.rewards, before.rewards), ("shadow", shadows, known_shadows))
        for name, part in parts.items()
        if name not in known
        or _asked_with(name, part) != _asked_with(name, known[name])
        or trains_on(spec, name, part) > trains_on(spec, name, known[name])
    ]
    there = ", ".join(sorted(directory.rewards)) or "none"
    unknown = [
        f"{kind}.{name}.service: this controller knows no reward service {service!r}; it knows: {there}"
        for name, part, kind in fresh
        if (service := part.service_of(name)) not in directory.rewards
    ]
    if unknown:
        raise InvalidJob(unknown)
    asked = {name: part for name, part, kind in fresh if kind == "rewards" or directory.rewards[part.service_of(name)]}
    known = before.rewards | known_shadows
    for name, part in asked.items():
        if name not in known or part.service_of(name) != known[name].service_of(name):
            await _describe(spec, name, part.service_of(name), directory, sources)
    if problems := await refusals(spec, asked, directory, sources):
        raise InvalidJob(problems)


def _asked_with(name: str, part: RewardPart) -> tuple[str, Mapping[str, str]]:
    return part.service_of(name), part.params


async def _describe(spec: JobSpec, name: str, service: str, directory: Directory, sources: Sources) -> None:
    client = RewardService(service, directory, spec.timeouts.score_s, RewardCalls(CollectorRegistry()))
    try:
        await client.check(name, await asyncio.to_thread(modality_of, spec, sources))
    except RewardFailure as failure:
        if failure.permanent:
            raise InvalidJob([str(failure)]) from None
        raise Conflict(f"{failure}; the job's rewards are unchanged") from None
    finally:
        await client.close()


async def _view(use: Services, record: JobRecord) -> Rewards:
    rewards = record.rewards
    history = await use.store.rewards.history(record.id)
    submitted = RewardRevision(
        number=0, rewards=record.spec["rewards"], requested_at=record.created_at, from_step=0, applied_at=None
    )
    return Rewards(
        revision=rewards.revision,
        active=rewards.active,
        pending=rewards.pending,
        history=[submitted, *history],
        comparison=await _comparisons(use, record.id, reward_set(rewards.active)),
    )


async def _comparisons(use: Services, job_id: str, active: RewardSet) -> dict[str, ShadowComparison]:
    found = {}
    for name, part in active.shadows.items():
        pair = pair_of(name, part, part.beside, active.rewards[part.beside])
        found[name] = ShadowComparison(
            beside=part.beside,
            **await use.store.shadows.counts(job_id, pair),
            train=await use.comparisons.of(use.store, job_id, pair, "train"),
            held_out=await use.comparisons.of(use.store, job_id, pair, "validate"),
        )
    return found
