"""Scores samples with a job's shadows once they have their score, without ever delaying the step.

A group is offered when its verdicts are recorded. Each shadow has a queue of its own and asks for a few groups at a
time, for it may share its service with a reward that the step waits for. A group that finds the queue full is left out,
and counted; so is what waits when the job's driver ends, without being counted. What fails is counted and not asked
again: a shadow has to show that it works.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import prometheus_client as prometheus
from prometheus_client import CollectorRegistry, Gauge
from redis.exceptions import RedisError

from flowfleet.api.samples import Purpose
from flowfleet.errors import FlowfleetError
from flowfleet.job.spec import RewardPart
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import common_pb2
from flowfleet.rewards.changes import ShadowPart
from services.controller.concurrency import end
from services.controller.job.context import JobCore
from services.controller.rewards.comparison import GroupScores, compare
from services.controller.store.sample_refs import ALL_STEPS
from services.controller.store.shadows import Count
from services.controller.waiting import NotYet

if TYPE_CHECKING:
    from services.controller.rewards.answers import Answer
    from services.controller.rewards.job_rewards import SampleScore

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Offers that wait for one shadow, each of a group or a few held-out samples."""
AT_ONCE = 2
"""Offers that one shadow is asked about at a time."""
RECENT_GROUPS = 64
"""Number of newest groups that the gauges cover."""
_LABELS = ("job", "shadow")


class ShadowMetrics:
    """Shadow metrics of a registry, made once and shared by every job's shadows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> prometheus.Counter:
            return prometheus.Counter(f"flowfleet_controller_reward_shadow_{name}", text, _LABELS, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"flowfleet_controller_reward_shadow_{name}", text, _LABELS, registry=registry)

        self.counts: Mapping[Count, prometheus.Counter] = {
            "scored": counter("scored_samples", "Samples that a shadow scored"),
            "failed": counter("failed_samples", "Samples that a shadow gave no score"),
            "left_out": counter("left_out_samples", "Samples that a shadow was not asked about because it was behind"),
        }
        self.spearman = gauge("spearman", "Rank correlation of a shadow with its reward over the last 64 groups")
        self.agreement = gauge("agreement", "Share of pairs in these groups that a shadow orders as its reward does")

    def forget(self, job_id: str, shadows: Iterator[str]) -> None:
        """Removes the series of a job whose driver ends."""
        for shadow in shadows:
            for metric in (*self.counts.values(), self.spearman, self.agreement):
                with suppress(KeyError):
                    metric.remove(job_id, shadow)


@dataclass(frozen=True, eq=False)
class _Offer:
    name: str
    part: ShadowPart
    pair: str
    samples: Sequence[common_pb2.Sample]
    prompts: Sequence[Prompt]
    verdicts: Sequence[SampleScore]

    @property
    def purpose(self) -> Purpose:
        return "validate" if self.samples[0].purpose == common_pb2.PURPOSE_VALIDATE else "train"


class ShadowQueue:
    """Shadow scoring of one job. `close` cancels its calls."""

    def __init__(self, job: JobCore, metrics: ShadowMetrics) -> None:
        self._job = job
        self._metrics = metrics
        self._queues: dict[str, asyncio.Queue[_Offer]] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._open: set[_Offer] = set()
        """Offers that wait or are scored."""
        self._pairs: set[str] = set()
        """Pairs with offered samples that an open step may have."""
        self._looked = (-1, -1)
        self._recent: defaultdict[str, deque[GroupScores]] = defaultdict(lambda: deque(maxlen=RECENT_GROUPS))

    async def offer(
        self, samples: Sequence[common_pb2.Sample], prompts: Sequence[Prompt], verdicts: Sequence[SampleScore]
    ) -> None:
        """Queues samples of one step, purpose and source of prompts. Never waits for a shadow."""
        if not samples:
            return
        await self._retire()
        step, machine = samples[0].id.step, self._job.machine
        is_held_out = samples[0].purpose == common_pb2.PURPOSE_VALIDATE
        rewards = machine.rewards_at(step) if is_held_out else machine.training_rewards_at(step)
        scoring = self._job.spec.data.scoring(prompts[0].origin, rewards)
        for name, part, pair in self._shadows_at(step):
            if part.beside not in scoring:
                continue
            await self._put(_Offer(name, part, pair, samples, prompts, verdicts))

    @property
    def first_offered(self) -> int:
        """First training step of which an offer is open; `ALL_STEPS` without one."""
        steps = (one.samples[0].id.step for one in self._open if one.purpose == "train")
        return min(steps, default=ALL_STEPS)

    async def close(self) -> None:
        await end(task for tasks in self._tasks.values() for task in tasks)
        self._metrics.forget(self._job.job_id, iter(self._queues))

    def _shadows_at(self, step: int) -> Iterator[tuple[str, ShadowPart, str]]:
        """Name, settings and pair."""
        rewards = self._job.machine.rewards_at(step)
        for name, part in self._job.machine.shadows_at(step).items():
            yield name, part, pair_of(name, part, part.beside, rewards[part.beside])

    async def _retire(self) -> None:
        """Ends what is kept of shadows that no open or later step has: they were removed or promoted."""
        machine = self._job.machine
        seen = (machine.rewards_number, machine.state.version)
        if seen == self._looked:
            return
        self._looked = seen
        steps = {*machine.state.batches, machine.state.version, machine.first_unopened}
        live = [shadow for step in steps for shadow in self._shadows_at(step)]
        gone = self._queues.keys() - {name for name, _, _ in live}
        tasks = [task for name in gone for task in self._tasks.pop(name)]
        pairs = self._pairs - {pair for _, _, pair in live}
        self._pairs -= pairs
        self._open = {offer for offer in self._open if offer.name not in gone}
        for name in gone:
            del self._queues[name]
        await end(tasks)
        self._metrics.forget(self._job.job_id, iter(gone))
        for pair in pairs:
            self._recent.pop(pair, None)
            await self._job.store.shadows.expire(self._job.job_id, pair)

    async def _put(self, offer: _Offer) -> None:
        self._pairs.add(offer.pair)
        if offer.name not in self._queues:
            self._queues[offer.name] = queue = asyncio.Queue[_Offer](MAX_WAITING)
            self._tasks[offer.name] = [
                asyncio.create_task(self._work(queue), name=f"shadow {offer.name}") for _ in range(AT_ONCE)
            ]
        try:
            self._queues[offer.name].put_nowait(offer)
            self._open.add(offer)
        except asyncio.QueueFull:
            await self._count(offer, {"left_out": len(offer.samples)})

    async def _work(self, queue: asyncio.Queue[_Offer]) -> None:
        while True:
            offer = await queue.get()
            try:
                await self._score(offer)
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                await self._leave_out(offer, "the call's channel was closed")
            except (FlowfleetError, RedisError, grpc.RpcError, OSError, ValueError) as error:  # mostly of the blobs
                await self._leave_out(offer, str(error))
            except Exception as error:
                log.exception("shadow %s", offer.name, extra={"job": self._job.job_id})
                await self._leave_out(offer, f"{type(error).__name__}: {error}")
            self._open.discard(offer)

    async def _leave_out(self, offer: _Offer, why: str) -> None:
        log.warning("shadow %s skipped samples: %s", offer.name, why, extra={"job": self._job.job_id})
        with suppress(RedisError):
            await self._count(offer, {"left_out": len(offer.samples)})

    async def _score(self, offer: _Offer) -> None:
        job = self._job
        given: Sequence[Answer | None] = [None] * len(offer.samples)
        try:
            given = await job.scoring.ask(offer.name, offer.part.as_reward(), offer.samples, offer.prompts)
        except NotYet as failure:
            log.warning("shadow %s failed: %s", offer.name, failure, extra={"job": job.job_id})
        scores = {
            (s.id.step, s.id.group, s.id.index): answer.score
            for s, answer in zip(offer.samples, given, strict=True)
            if answer is not None and answer.score is not None
        }
        await job.store.samples.put_shadow(job.job_id, offer.purpose, offer.name, scores)
        groups = [*grouped(offer.part.beside, offer.samples, offer.verdicts, given)]
        await job.store.shadows.add(job.job_id, offer.pair, offer.purpose, groups)
        await self._count(offer, {"scored": len(scores), "failed": len(offer.samples) - len(scores)})
        if offer.purpose == "train":
            self._show(offer, groups)

    async def _count(self, offer: _Offer, counts: Mapping[Count, int]) -> None:
        for name, number in counts.items():
            self._metrics.counts[name].labels(self._job.job_id, offer.name).inc(number)
        await self._job.store.shadows.count(self._job.job_id, offer.pair, counts)

    def _show(self, offer: _Offer, groups: Sequence[GroupScores]) -> None:
        recent = self._recent[offer.pair]
        recent.extend(groups)
        found, labels = compare(recent), (self._job.job_id, offer.name)
        for gauge, value in ((self._metrics.spearman, found.spearman), (self._metrics.agreement, found.agreement)):
            gauge.labels(*labels).set(float("nan") if value is None else value)


def grouped(
    beside: str,
    samples: Sequence[common_pb2.Sample],
    verdicts: Sequence[SampleScore],
    answers: Sequence[Answer | None],
) -> Iterator[GroupScores]:
    """Yields the scores of reward and shadow by group, only of samples that have a score of the reward."""
    groups: defaultdict[tuple[int, int], list[tuple[SampleScore, Answer | None]]] = defaultdict(list)
    for sample, verdict, answer in zip(samples, verdicts, answers, strict=True):
        if beside in verdict.rewards:
            groups[sample.id.step, sample.id.group].append((verdict, answer))
    for (step, group), rows in groups.items():
        both = [(v, a, a.score) for v, a in rows if a is not None and a.score is not None]
        seconds = [verdict.seconds[beside] for verdict, _ in rows if beside in verdict.seconds]
        yield GroupScores(
            step=step,
            group=group,
            active=[verdict.rewards[beside] for verdict, _, _ in both],
            shadow=[score for _, _, score in both],
            failed=len(rows) - len(both),
            active_s=max(seconds, default=None),
            shadow_s=max((answer.seconds for _, answer, _ in both), default=None),
            active_version=rows[0][0].versions.get(beside, ""),
            shadow_version=both[0][1].version if both else "",
        )


def pair_of(name: str, shadow: ShadowPart, beside: str, reward: RewardPart) -> str:
    """Names a shadow, the reward that it is compared with and both settings: other settings are another comparison."""
    settings = [shadow.service or name, shadow.params, beside, reward.service_of(beside), reward.params]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return f"{name}.{digest[:16]}"
