"""How many replicas each rollout pool and each reward should have: reported to KEDA (keda.py).

Pure rules over what the leader knows of its jobs, and the hash in Redis that it writes them to, from which every
controller answers. They count admitted work that is waiting, never what lies in streams: a pool is too small while
samples wait for a replica, not while finished ones wait for the trainer, and streams are trimmed.

- A pool works for all of its jobs whose trainers have a place; queued ones add nothing.
- It has one replica at least from the first such job on, between steps too: there must be somebody to publish
  to. Before, replicas could take the place that the trainer waits for.
- More, while the samples that a job wants are more than replicas take at once, up to one a request.
- None while all of its jobs are paused, without jobs, or where the job's trainer makes all samples. A
  reward has one at least while such a job of any pool names it.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from flowfleet.api.jobs import Desired, JobStatus
from flowfleet.redis import keys
from services.controller.fleet.pool import LOOKAHEAD
from services.controller.job.machine.command import Validate
from services.controller.job.machine.state_machine import Machine
from services.controller.rewards.scoring import MAX_SCORING
from services.controller.store.leadership import Lease
from services.controller.store.records import JobRecord

Component = Literal["rollout", "reward"]
Name = tuple[Component, str]

REWARD_SAMPLES = 32
"""Samples that a replica of a reward takes at once."""
FRESH_S = 5.0
"""A hash that was not written for so long has no leader that keeps it."""
_UPDATED = "updated"


@dataclass(frozen=True)
class Work:
    """Work of a job. One whose driver has yet to begin has no samples to make, but counts."""

    job_id: str
    pool: str
    rewards: tuple[str, ...]
    uses_rollouts: bool = True
    """Takes samples from rollouts; else from its trainer alone."""
    samples: int = 0
    """Number of samples that open steps and validations want, including those on their way."""
    requests: int = 0
    """Number of requests for those samples; a replica beyond that many would get none."""
    samples_per_replica: int = 1
    """Number of samples that a replica is given at once."""
    unscored: int = 0
    """Samples that wait for a reward or are there."""
    held_out: int = 0
    """Held-out samples among them."""
    spared: frozenset[str] = frozenset()
    """Rewards that are asked about held-out samples alone."""

    def unscored_by(self, reward: str) -> int:
        """Samples that wait for this reward or are there."""
        return self.held_out if reward in self.spared else self.unscored


class Demand(BaseModel):
    """Demand of one pool or reward."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    replicas: int
    waiting: int = 0
    """Samples that no replica has begun."""
    in_flight: int = 0
    """Samples that replicas were asked for."""
    jobs: tuple[str, ...] = ()


def work_of(record: JobRecord, machine: Machine | None = None, num_held_out: int = 0) -> Work | None:
    """Work of a job whose trainer has a place; none if it needs nothing now. `machine`: of a job whose driver runs."""
    if record.status.terminal or record.desired is not Desired.RUNNING or (machine is not None and machine.finished):
        return None
    uses_rollouts = record.spec.get("trainer", {}).get("samples") != "only"
    work = Work(record.id, record.pool, tuple(sorted(_services(record, machine))), uses_rollouts)
    if machine is None:
        return work
    rollout, batches = machine.spec.rollout, machine.state.batches.values()
    prompts = num_held_out if any(isinstance(command, Validate) for command in machine.commands(most=0)) else 0
    held_out = prompts * machine.spec.schedule.validation_samples
    open_groups = [len(batch.wanting) for batch in batches]
    return Work(
        work.job_id,
        work.pool,
        work.rewards,
        work.uses_rollouts,
        samples=sum(batch.count("wanted") for batch in batches) + held_out,
        requests=sum(math.ceil(groups / machine.spec.groups_per_request) for groups in open_groups)
        + math.ceil(prompts / machine.spec.held_out_per_request),
        samples_per_replica=LOOKAHEAD * rollout.batch_size,
        unscored=sum(batch.count("sampled") for batch in batches) + held_out,
        held_out=held_out,
        spared=frozenset(work.rewards) - _services(record, machine, training=True),
    )


def _services(record: JobRecord, machine: Machine | None, *, training: bool = False) -> set[str]:
    """Reward services that the job asks now, or will from the next step on; its shadows' too. `training`: those alone
    that score training samples."""
    if machine is None:
        newest = record.rewards.newest
        parts = [*(newest.rewards or record.spec.get("rewards", {})).items(), *newest.shadows.items()]
        return {part.get("service") or name for name, part in parts}
    steps = {*machine.state.batches, machine.state.version, machine.first_unopened}
    at = machine.training_rewards_at if training else machine.rewards_at
    rewards = {part.service_of(name) for step in steps for name, part in at(step).items()}
    return rewards | {part.service or name for step in steps for name, part in machine.shadows_at(step).items()}


def demand(works: Iterable[Work], in_flight: Mapping[str, int]) -> dict[Name, Demand]:
    """Demand of each pool and reward that is needed, from the work of all jobs. Jobs of a pool take turns at all of its
    replicas, so the one that needs most says how many. `in_flight`: samples requested from the replicas of a pool."""
    found: dict[Name, Demand] = {}
    scoring: defaultdict[str, list[Work]] = defaultdict(list)
    sampling: defaultdict[str, list[Work]] = defaultdict(list)
    for work in works:
        if work.uses_rollouts:
            sampling[work.pool].append(work)
        for name in work.rewards:
            scoring[name].append(work)
    for pool, users in sampling.items():
        samples = sum(work.samples for work in users)
        out = min(samples, in_flight.get(pool, 0))
        found["rollout", pool] = Demand(
            replicas=max(1, *(min(math.ceil(w.samples / w.samples_per_replica), w.requests) for w in users)),
            waiting=samples - out,
            in_flight=out,
            jobs=tuple(sorted(work.job_id for work in users)),
        )
    for name, users in scoring.items():
        at_once = sum(min(work.unscored_by(name), MAX_SCORING) for work in users)
        found["reward", name] = Demand(
            replicas=max(1, math.ceil(at_once / REWARD_SAMPLES)),
            waiting=sum(work.unscored_by(name) for work in users) - at_once,
            in_flight=at_once,
            jobs=tuple(sorted(work.job_id for work in users)),
        )
    return found


def at_least(records: Iterable[JobRecord]) -> dict[Name, Demand]:
    """Returns what jobs need whose trainers have had a place: one replica of each pool and reward."""
    able = [record for record in records if record.status is JobStatus.RUNNING and not record.is_unreadable]
    return demand([work for record in able if (work := work_of(record))], {})


class DemandHash:
    """`keys.demand()`: "component/name" → Demand as JSON, written by the leader alone."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._last: dict[Name, int] | None = None

    async def write(self, lease: Lease, demands: Mapping[Name, Demand]) -> None:
        """Replaces what is there, and tells everybody when a number of replicas is another one. Raises LeaseLost."""
        seconds, _ = await self._redis.time()
        fields: dict[str, str] = {"/".join(name): demand.model_dump_json() for name, demand in demands.items()}
        fields[_UPDATED] = str(seconds)
        replicas = {name: demand.replicas for name, demand in demands.items()}

        async def fill(pipe: Any) -> None:
            pipe.multi()
            pipe.delete(keys.demand())
            pipe.hset(keys.demand(), mapping=fields)
            if replicas != self._last:
                pipe.publish(keys.changes(), "demand")

        await lease.transaction(fill)
        self._last = replicas

    async def read(self) -> tuple[dict[Name, Demand], bool]:
        """Returns what the leader wrote last, and if one still does. By the server's clock, because hosts' differ."""
        async with self._redis.pipeline(transaction=True) as pipe:
            fields, (seconds, _) = await pipe.hgetall(keys.demand()).time().execute()
        updated = int(fields.pop(_UPDATED.encode(), 0))
        found: dict[Name, Demand] = {}
        for field, value in fields.items():
            component, _, name = field.decode().partition("/")
            found[component, name] = Demand.model_validate(json.loads(value))
        return found, seconds - updated <= FRESH_S
