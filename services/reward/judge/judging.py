"""A rubric put to samples: alone, in pairs of a group, or all of a group in an order; each gets an outcome."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from flowfleet.errors import Unavailable
from flowfleet.media.files import MediaError
from flowfleet.rewards.requests import EncodedSample
from services.reward.execution.groups import by_group
from services.reward.judge.answers import Answer
from services.reward.judge.calls.breaker import FailureShare
from services.reward.judge.calls.client import JudgeClient
from services.reward.judge.comparisons import (
    borda,
    bradley_terry,
    choose_lists,
    choose_pairs,
    parse_ranking,
    seeded,
    win_rates,
)
from services.reward.judge.errors import CallFailed
from services.reward.judge.media import (
    MAX_FRAME_PIXELS,
    Part,
    Picture,
    Room,
    digest_of,
    parts_of,
    pictures_of,
    source_picture,
)
from services.reward.judge.messages import chat_request, filled
from services.reward.judge.metrics import JudgeMetrics
from services.reward.judge.rubrics import SOURCE, Mode, Rubric
from services.reward.judge.scale import Reading
from services.reward.judge.settings import JudgeSettings, VlmSettings
from services.reward.remote.turns import Turns
from services.reward.scorer import Outcome, Problem, Score

Found = TypeVar("Found")

COMPONENTS: Final[Mapping[Mode, tuple[str, ...]]] = {
    "pointwise": ("by_logprobs", "mass", "entropy"),
    "pairwise": ("win_rate", "comparisons", "order_agreement"),
    "listwise": ("rankings",),
}
SERVER, REFUSED, ANSWER, GROUP, SOURCE_MISSING = (
    "judge_server",
    "judge_refused",
    "judge_answer",
    "judge_group",
    "judge_source",
)
"""Reasons of problems."""


class Refused(Exception):
    """Carries the problem of one sample or question."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(reason, message)


class Questions:
    """Asks and reads answers, and keeps count of those that could not be read."""

    def __init__(self, settings: JudgeSettings, metrics: JudgeMetrics) -> None:
        self.client = JudgeClient(settings, metrics)
        self._settings = settings
        self._metrics = metrics
        self._failures = FailureShare(settings.max_parse_failures)
        self._turns = Turns()
        self._frames = Room(MAX_FRAME_PIXELS)
        self.samples = Room(2 * settings.max_concurrency * len(settings.urls))
        """Samples that are prepared or judged at a time: the others have only their encoded media in memory."""

    async def parts_of(self, sample: EncodedSample, num_frames: int) -> list[Part]:
        """Prepares samples one by one, like `media.parts_of`. Raises MediaError."""
        await self._turns.take()
        return await parts_of(sample.media, sample.media_type, num_frames, self._frames)

    async def pictures_of(self, sample: EncodedSample, num_frames: int) -> list[Picture]:
        """Prepares pictures sample by sample, like `media.pictures_of`. Raises MediaError."""
        await self._turns.take()
        return await pictures_of(sample.media, sample.media_type, num_frames, self._frames)

    async def ask(
        self,
        system: str,
        parts: Sequence[Part],
        params: Mapping[str, Any],
        read: Callable[[Answer], Found],
        top_logprobs: int | None = None,
    ) -> Found:
        """Asks the model and returns what `read` makes of its answer; `read` raises ValueError where it cannot. Fresh
        answers are counted, and kept if they could be read. Raises Refused."""
        settings = self._settings
        whole = {"temperature": settings.temperature, "seed": 0, **params, **settings.extra}
        request = chat_request(settings.model, system, parts, whole, top_logprobs)
        known = self.client.known(request)
        if known is not None:
            return read(known)
        try:
            answer = await self.client.ask(request)
            found = read(answer)
        except CallFailed as failure:
            raise Refused(SERVER if failure.blames_server or failure.retry else REFUSED, str(failure)) from failure
        except ValueError as error:
            self._count(request.key, "failed")
            raise Refused(ANSWER, f"{settings.model}: {error}") from error
        self._count(request.key, "logprobs" if answer.tokens else "parsed")
        self.client.keep(request, answer)
        return found

    def _count(self, question: bytes, outcome: str) -> None:
        self._failures.observe(question, outcome == "failed")
        self._metrics.answers.labels(outcome=outcome).inc()

    def unless_broken(self, outcomes: Sequence[Outcome], what: str) -> list[Outcome]:
        """The outcomes. Raises Unavailable where the servers failed on any, or too many answers cannot be read: then
        the call is asked again, and the cache has what was answered, or the job's `on_failure` decides."""
        problems = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
        if failed := by_server(problems):
            raise Unavailable(failed.message)
        excess = self._failures.excess
        if excess and any(problem.reason == ANSWER for problem in problems):
            last = next(problem.message for problem in problems if problem.reason == ANSWER)
            raise Unavailable(
                f"{excess} of {self._settings.model} cannot be read with {what}, settings.max_parse_failures is "
                f"{self._settings.max_parse_failures:g}: {last}"
            )
        return list(outcomes)


async def at_once(asked: Sequence[Coroutine[Any, Any, Found]]) -> list[Found]:
    """The results of all; one alone gets no task of its own."""
    return [await asked[0]] if len(asked) == 1 else list(await asyncio.gather(*asked))


def by_server(problems: Sequence[Problem]) -> Problem | None:
    """The first that is no sample's own."""
    return next((problem for problem in problems if problem.reason == SERVER), None)


@dataclass(frozen=True, eq=False, slots=True)
class Prepared:
    """A sample as its slots see it."""

    texts: Mapping[str, str]
    shown: Sequence[Part]
    """The sample itself: pictures, or a text."""
    source: Mapping[str, Sequence[Picture]]

    @property
    def digest(self) -> bytes:
        return digest_of(self.shown)


class Judge:
    """Puts one rubric to samples."""

    def __init__(self, rubric: Rubric, settings: VlmSettings, questions: Questions) -> None:
        self._rubric = rubric
        self._settings = settings
        self._questions = questions
        self._shows_source = ("slot", SOURCE) in rubric.pieces

    async def score(self, samples: Sequence[EncodedSample]) -> list[Outcome]:
        """Scores the samples and returns one outcome per sample, in order. Raises Unavailable."""
        if self._rubric.mode == "pointwise":
            outcomes = await at_once([self._alone(sample) for sample in samples])
        else:
            compare = self._pairs if self._rubric.mode == "pairwise" else self._rankings
            outcomes = await by_group(samples, lambda group: self._group(group, compare))
        return self._questions.unless_broken(outcomes, "the rubric (settings.rubric)")

    async def _alone(self, sample: EncodedSample) -> Outcome:
        try:
            async with self._questions.samples.take(1):
                prepared = await self._prepare(sample)
                reading = await self._read({self._rubric.slots[0]: prepared.shown, **prepared.source}, prepared.texts)
        except Refused as refused:
            return refused.problem
        if reading.mass is None or reading.entropy is None:
            return Score(reading.value, {"by_logprobs": 0.0})
        return Score(reading.value, {"by_logprobs": 1.0, "mass": reading.mass, "entropy": reading.entropy})

    async def _group(
        self, samples: Sequence[EncodedSample], compare: Callable[[Sequence[Prepared]], Awaitable[list[Outcome]]]
    ) -> list[Outcome]:
        """Compares a group in its turn. Samples that cannot be shown get their problem."""
        message = (
            f"a {self._rubric.mode} rubric compares the samples of a group, and this one came with no other that can "
            "be shown: held-out samples are groups of one, for which only a pointwise rubric has a score; a group of "
            "training must come in one call (the service's --max-batch, the job's group size)"
        )
        async with self._questions.samples.take(len(samples)):
            shown: list[Prepared | Problem] = list(await asyncio.gather(*(self._shown(sample) for sample in samples)))
            good = [one for one in shown if isinstance(one, Prepared)]
            outcomes = iter(await compare(good) if len(good) > 1 else [Problem(GROUP, message)] * len(good))
        return [one if isinstance(one, Problem) else next(outcomes) for one in shown]

    async def _shown(self, sample: EncodedSample) -> Prepared | Problem:
        try:
            return await self._prepare(sample)
        except Refused as refused:
            return refused.problem

    async def _prepare(self, sample: EncodedSample) -> Prepared:
        texts = {"prompt": sample.prompt, **{f"metadata.{name}": text for name, text in sample.metadata.items()}}
        try:
            shown = await self._questions.parts_of(sample, self._rubric.num_frames)
            if not self._shows_source:
                return Prepared(texts, shown, {})
            source = await asyncio.to_thread(source_picture, sample.metadata, self._settings.media_root)
        except MediaError as error:
            raise Refused(error.reason, str(error)) from error
        except ValueError as error:
            raise Refused(SOURCE_MISSING, str(error)) from error
        return Prepared(texts, shown, {SOURCE: [source]})

    async def _pairs(self, group: Sequence[Prepared]) -> list[Outcome]:
        count = len(group)
        draw = seeded([one.digest for one in group], group[0].texts["prompt"])
        pairs = choose_pairs(count, self._rubric.max_pairs, draw)
        asked = await asyncio.gather(*(self._compare(group[first], group[second]) for first, second in pairs))
        answered = [(pair, found) for pair, found in zip(pairs, asked, strict=True) if not isinstance(found, Problem)]
        problems = [found for found in asked if isinstance(found, Problem)]
        if failed := by_server(problems):
            return [failed] * count
        known = [pair for pair, _ in answered]
        wins = [(there + 1.0 - back) / 2.0 for _, (there, back) in answered]
        rates = win_rates(count, known, wins)
        strengths = bradley_terry(count, known, wins) if self._rubric.aggregate == "bradley_terry" else rates
        outcomes: list[Outcome] = []
        for place in range(count):
            own = [found for pair, found in answered if place in pair]
            if not own:
                outcomes.append(problems[0])
                continue
            agreement = math.fsum(1.0 - abs(there + back - 1.0) for there, back in own) / len(own)
            components = {
                "win_rate": float(rates[place]),
                "comparisons": float(len(own)),
                "order_agreement": agreement,
            }
            outcomes.append(Score(float(strengths[place]), components))
        return outcomes

    async def _compare(self, one: Prepared, other: Prepared) -> tuple[float, float] | Problem:
        """How far the one first shown is better, with `one` first and with `other` first."""
        orders = ((one, other), (other, one))
        asked = [
            self._read({**dict(zip(self._rubric.slots, shown, strict=True)), **one.source}, one.texts)
            for shown in ((first.shown, second.shown) for first, second in orders)
        ]
        found = await asyncio.gather(*asked, return_exceptions=True)
        for failure in found:
            if isinstance(failure, BaseException) and not isinstance(failure, Refused):
                raise failure
        problems = [failure.problem for failure in found if isinstance(failure, Refused)]
        if problems:
            return by_server(problems) or problems[0]
        there, back = (reading.value for reading in found if isinstance(reading, Reading))
        return there, back

    async def _rankings(self, group: Sequence[Prepared]) -> list[Outcome]:
        draw = seeded([one.digest for one in group], group[0].texts["prompt"])
        lists = [
            order
            for _ in range(self._rubric.num_rankings)
            for order in choose_lists(len(group), self._rubric.list_size, draw)
            if len(order) > 1
        ]
        asked = await asyncio.gather(*(self._rank([group[place] for place in order]) for order in lists))
        rankings = [
            [order[place] for place in found]
            for order, found in zip(lists, asked, strict=True)
            if not isinstance(found, Problem)
        ]
        problems = [found for found in asked if isinstance(found, Problem)]
        if failed := by_server(problems):
            return [failed] * len(group)
        return [
            problems[0] if math.isnan(place) else Score(float(place), {"rankings": float(count)})
            for place, count in zip(
                borda(len(group), rankings),
                [sum(number in ranking for ranking in rankings) for number in range(len(group))],
                strict=True,
            )
        ]

    async def _rank(self, shown: Sequence[Prepared]) -> list[int] | Problem:
        parts: list[Part] = []
        for number, one in enumerate(shown, 1):
            parts += [f"\n{number}: ", *one.shown]
        texts = {**shown[0].texts, "count": str(len(shown))}
        try:
            return await self._ask(
                {self._rubric.slots[0]: parts, **shown[0].source},
                texts,
                lambda answer: parse_ranking(answer.text, len(shown)),
                logprobs=False,
            )
        except Refused as refused:
            return refused.problem

    async def _read(self, shown: Mapping[str, Sequence[Part]], texts: Mapping[str, str]) -> Reading:
        rubric, settings = self._rubric, self._settings

        def read(answer: Answer) -> Reading:
            if settings.logprobs == "require" and not answer.tokens:
                raise Refused(
                    SERVER,
                    f"{', '.join(settings.urls)} gave no log-probabilities of its tokens: it must be started with "
                    'them, or settings.logprobs be "auto"',
                )
            return rubric.answers.read(answer, rubric.take, rubric.min_mass)

        return await self._ask(shown, {**texts, "count": "2"}, read, logprobs=settings.logprobs != "never")

    async def _ask(
        self,
        pictures: Mapping[str, Sequence[Part]],
        texts: Mapping[str, str],
        read: Callable[[Answer], Found],
        logprobs: bool,
    ) -> Found:
        try:
            parts = filled(self._rubric, texts, pictures)
        except ValueError as error:
            raise Refused(SOURCE_MISSING, str(error)) from error
        params = {"max_tokens": self._rubric.max_tokens}
        top_logprobs = self._settings.top_logprobs if logprobs else None
        return await self._questions.ask(self._rubric.system, parts, params, read, top_logprobs)
