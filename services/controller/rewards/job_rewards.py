"""Asks the rewards of a job and joins their answers: one finite total a sample, or the reason why there is none.

    score ─► every reward at once (client.py) ─► answers (answers.py) ─► total (composition.py)

A reward that fails is asked again until `timeouts.rewards_s` has passed since its samples were first sent, one whose
scores are pending until `timeouts.pending_s` has; then its `on_failure` decides. What it is never is a zero. The clock
and the answers so far are in memory: a controller that was restarted begins again.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from prometheus_client import CollectorRegistry

from flowfleet import hub
from flowfleet.job.drop_reasons import DropReason
from flowfleet.job.spec import JobSpec, RewardPart
from flowfleet.models.registry import family_of
from flowfleet.proto import reward_pb2
from flowfleet.rewards.requests import EncodedSample
from services.controller.fleet.directory import Directory
from services.controller.prompts.sources import Sources
from services.controller.rewards.answers import Answer
from services.controller.rewards.client import RewardService
from services.controller.rewards.composition import PREFERENCE, Composed, compose
from services.controller.rewards.failures import RewardFailure, RewardPause, why_failed, why_pending
from services.controller.rewards.metrics import RewardCalls
from services.controller.rewards.outages import MAX_PENDING_S, Attempt, Outage
from services.controller.waiting import Check

log = logging.getLogger(__name__)

MAX_CAUSE = 300
"""Characters of a cause that are kept."""
Samples = Sequence[EncodedSample]
Fetch = Callable[[], Awaitable[Samples]]


@dataclass(frozen=True)
class SampleScore:
    """Scores that the rewards gave one sample. `reason` is set where `score` is not."""

    score: float | None
    """The total."""
    reason: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    """Reward → raw score, and reward.component → value."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Reward → raw score alone; without those that were skipped."""
    versions: dict[str, str] = field(default_factory=dict)
    """Reward → name and version of the scorer that gave its score."""
    gated_by: str = ""
    """The reward whose gate made the total 0, or masked the sample."""
    skipped: tuple[str, ...] = ()
    """Rewards that failed and that the total goes without."""
    given_up: bool = False
    """There is no total because a reward failed for too long: another sample would fare the same."""
    cause: str = ""
    """Error in words, where there is no total."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Reward → of the call that gave its score."""


def preference(index: int) -> SampleScore:
    """Scores a sample of a preference data set by definition: 1 if chosen (index 0), 0 if rejected (index 1)."""
    scores = {PREFERENCE: 1.0 - index}
    return SampleScore(1.0 - index, scores=scores, rewards=scores)


def modality_of(spec: JobSpec, sources: Sources) -> reward_pb2.Modality.ValueType:
    """Returns the modality that the rewards of a job must be able to score; MODALITY_SOUND for films with sound."""
    if spec.writes_tokens:
        return reward_pb2.MODALITY_TEXT
    if spec.rollout.num_frames == 1:
        return reward_pb2.MODALITY_IMAGE
    try:
        sounds = family_of(hub.configurations(sources.places.pipeline(spec.model.path))).sounds
    except (OSError, ValueError):  # a submit has refused it; a running job's model may have gone since
        sounds = True
    return reward_pb2.MODALITY_SOUND if sounds else reward_pb2.MODALITY_VIDEO


class _Fetched:
    """Samples that all rewards share, fetched when the first of them is asked."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch
        self._lock = asyncio.Lock()
        self._samples: Samples | None = None

    async def samples(self) -> Samples:
        async with self._lock:
            if self._samples is None:
                self._samples = await self.fetch()
            return self._samples


class JobRewards:
    """The rewards of one job: which there are, each call says.

    `deadline_s` is a call's, `patience_s` is `timeouts.rewards_s`, `pending_s` that timeout; `clock` gives seconds.
    """

    def __init__(
        self,
        directory: Directory,
        deadline_s: float,
        modality: reward_pb2.Modality.ValueType = reward_pb2.MODALITY_IMAGE,
        calls: RewardCalls | None = None,
        changed_file: Callable[[str, str, Collection[Answer]], Awaitable[str]] | None = None,
        patience_s: float = 1800.0,
        pending_s: float = 72_000.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._deadline_s = deadline_s
        self._modality = modality
        self._calls, self._changed_file = calls or RewardCalls(CollectorRegistry()), changed_file
        self._patience_s, self._pending_s = patience_s, pending_s
        self._clock = clock
        self._services: dict[str, RewardService] = {}
        self._attempts: dict[tuple[tuple[str, str], ...], Attempt] = {}
        self._outages: defaultdict[tuple[str, str], Outage] = defaultdict(Outage)

    async def close(self) -> None:
        await asyncio.gather(*(service.close() for service in self._services.values()))

    async def group_rewards(self, rewards: Mapping[str, RewardPart]) -> list[str]:
        """Names of those that score whole groups only; of a service that does not answer now, by what it said last."""
        found = []
        for name, part in sorted(rewards.items()):
            service = self._service(name, part)
            with suppress(RewardFailure):
                await service.check(name, self._modality)
            if service.needs_group:
                found.append(name)
        return found

    def _service(self, name: str, part: RewardPart) -> RewardService:
        service = part.service_of(name)
        if service not in self._services:
            self._services[service] = RewardService(service, self._directory, self._deadline_s, self._calls)
        return self._services[service]

    async def ask(self, name: str, part: RewardPart, samples: Samples) -> dict[str, Answer]:
        """Answers of one reward by sample id, one for each sample; those of a group stand together. Raises
        RewardFailure when the service fails as a whole."""
        service = part.service_of(name)
        answers = await self._service(name, part).ask(name, part.params, samples, self._modality)
        for sample_id, answer in answers.items():
            if answer.score is None and answer.fault != "pending":
                self._calls.rejected(service, answer.fault)
                told = name, service, answer.problem
                log.warning("reward %s: service %r gave no score: %s", *told, extra={"sample": sample_id})
        return answers

    async def score(
        self, rewards: Mapping[str, RewardPart], step: int, digests: Mapping[str, str], fetch: Fetch
    ) -> dict[str, SampleScore]:
        """Verdicts by sample id, one for each sample, of the weights at a step; samples of a group stand together.

        `digests`: sample id → digest of its media; `fetch` gives the samples in that order. It is called once at most,
        and not if no reward is called.

        Raises RewardFailure while a reward fails and the job waits for it: call again, this method sleeps first. Raises
        RewardPending while scores are pending: call again when it says. Raises RewardPause when one of them took too
        long and the job must pause.
        """
        settings = ((name, part.model_dump_json()) for name, part in sorted(rewards.items()))
        key = (*settings, *digests.items())
        attempt = self._attempt(key)
        names = sorted(rewards)
        with attempt.in_use(self._clock):
            fetched = _Fetched(fetch)
            tasks = [self._settled(name, rewards[name], len(digests), fetched, attempt) for name in names]
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for kind in (RewardPause, RewardFailure, BaseException):
            if failure := next((result for result in results if isinstance(result, kind)), None):
                raise failure
        self._attempts = {known: one for known, one in self._attempts.items() if one is not attempt}
        answers = {name: result for name, result in zip(names, results, strict=True) if isinstance(result, dict)}
        for name in rewards.keys() - answers.keys():
            self._calls.gave_up(name, rewards[name].on_failure, len(digests))
        return {sample_id: self._verdict(rewards, step, sample_id, answers) for sample_id in digests}

    def reset(self) -> None:
        """Counts nothing that failed before, as of a job that is resumed: calls that are still away neither pause it
        nor are they known later."""
        self._attempts.clear()
        self._outages.clear()

    def _attempt(self, key: tuple[tuple[str, str], ...]) -> Attempt:
        """Continues a scoring, or begins one. Abandoned ones are forgotten after a while."""
        now, idle_s = self._clock(), 2 * (self._patience_s + MAX_PENDING_S)
        for each in [key for key, one in self._attempts.items() if one.idle_s(now) > idle_s]:
            del self._attempts[each]
        return self._attempts.setdefault(key, Attempt(now))

    def _is_current(self, attempt: Attempt) -> bool:
        """True if the attempt is known, not one from before a pause."""
        return any(attempt is known for known in self._attempts.values())

    async def _settled(
        self, name: str, part: RewardPart, count: int, fetched: _Fetched, attempt: Attempt
    ) -> dict[str, Answer] | None:
        """Answers of a reward; None if it failed for too long and the samples do without it or are dropped."""
        if name in attempt.answers:
            return attempt.answers[name]
        attempt.check_due(name, self._clock())
        outage = self._outages[name, part.service_of(name)]
        if outage.may_ask(self._clock()):
            await asyncio.sleep(attempt.delay(name))
        if not outage.may_ask(self._clock()):
            return None
        try:
            with outage.asking(self._clock):
                answers = await self.ask(name, part, await fetched.samples())
        except RewardFailure as failure:
            self._calls.failed(name)
            if not self._is_current(attempt):
                raise
            self._failed(name, part, count, attempt, failure, partial(self._works, name, part, fetched.fetch))
            return None
        check = self._changed_file
        if check and (changed := await check(name, part.service_of(name), answers.values())):
            self._pause(name, count, changed)
        outage.worked(self._clock())
        if pending := [answer.problem for answer in answers.values() if answer.fault == "pending"]:
            self._wait(name, part, count, attempt, pending[0])
            return None
        attempt.answers[name] = answers
        return answers

    def _wait(self, name: str, part: RewardPart, count: int, attempt: Attempt, why: str) -> None:
        """Raises RewardPending while the job waits for the scores, RewardPause if the job must pause; else these
        samples go without."""
        now = self._clock()
        if now - attempt.started < self._pending_s or not self._is_current(attempt):
            attempt.wait(name, why, now)
            attempt.check_due(name, now)
        if part.on_failure == "pause":
            self._pause(name, count, why_pending(name, why, self._pending_s))

    async def _works(self, name: str, part: RewardPart, fetch: Fetch) -> bool:
        """True if the reward scores the samples, or fails in a way that waiting does not mend."""
        try:
            await self.ask(name, part, await fetch())
        except RewardFailure as failure:
            return failure.permanent and not failure.may_heal
        return True

    def _failed(
        self, name: str, part: RewardPart, count: int, attempt: Attempt, failure: RewardFailure, works: Check
    ) -> None:
        """Raises the failure while the job waits for the reward, RewardPause if the job must pause: until it `works`,
        where it scores no sample. It is then given up for all samples; else these alone go without."""
        now, outage = self._clock(), self._outages[name, part.service_of(name)]
        since = outage.failed(attempt.started, str(failure))
        attempt.failures[name] = attempt.failures.get(name, 0) + 1
        is_away = now - since >= self._patience_s
        is_over = is_away or now - attempt.started >= self._patience_s
        is_final = failure.permanent and not failure.may_heal
        if part.on_failure == "pause" and (is_over or is_final):
            heals, waited_s = is_away and not is_final, self._patience_s if is_over else None
            why = why_failed(name, failure, waited_s, is_away, by_itself=heals)
            self._pause(name, count, why, works if heals else None)
        if not is_over:
            raise failure
        if is_away:
            outage.give_up(now)

    def _pause(self, name: str, count: int, reason: str, until: Check | None = None) -> NoReturn:
        self.reset()
        self._calls.gave_up(name, "pause", count)
        raise RewardPause(reason, until)

    def _cause(
        self,
        rewards: Mapping[str, RewardPart],
        absent: Sequence[str],
        answers: Mapping[str, Mapping[str, Answer]],
        sample_id: str,
    ) -> str:
        """Why the first of the rewards without a score gave none; "" where it said nothing."""
        for name in absent:
            outage = self._outages[name, rewards[name].service_of(name)]
            if cause := answers[name][sample_id].problem if name in answers else outage.reason:
                return cause[:MAX_CAUSE]
        return ""

    def _verdict(
        self, rewards: Mapping[str, RewardPart], step: int, sample_id: str, answers: Mapping[str, Mapping[str, Answer]]
    ) -> SampleScore:
        given = {name: answers[name][sample_id] for name in sorted(rewards) if name in answers}
        scored = {name: answer for name, answer in given.items() if answer.score is not None}
        absent = [name for name in sorted(rewards) if name not in scored]
        skipped = tuple(name for name in absent if name not in given and rewards[name].on_failure == "skip")
        missing = [name for name in absent if name not in skipped]
        raw = {name: answer.score for name, answer in scored.items() if answer.score is not None}
        shown: dict[str, float] = {}
        for name, answer in scored.items():
            shown |= {name: raw[name], **{f"{name}.{part}": value for part, value in answer.components.items()}}
        if missing:
            composed = Composed(None, DropReason.NO_SCORE.of(missing[0]))
            given_up = not set(missing) <= answers.keys()
        else:
            composed = compose(rewards, step, raw)
            given_up = composed.total is None and bool(skipped)
        cause = self._cause(rewards, missing or skipped, answers, sample_id) if composed.total is None else ""
        if composed.gated_by:
            self._calls.gated(composed.gated_by, "zero" if composed.total is not None else "mask")
        return SampleScore(
            composed.total,
            composed.reason,
            scores=shown,
            rewards=raw,
            versions={name: answer.version for name, answer in scored.items()},
            gated_by=composed.gated_by,
            skipped=skipped,
            given_up=given_up,
            cause=cause,
            seconds={name: answer.seconds for name, answer in scored.items()},
        )
