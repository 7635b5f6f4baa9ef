"""The state machines: limiter, breaker, budget, cache, share of failures; all with a clock of the test."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.lru import LruCache
from services.reward.judge.calls.breaker import LEAST, BreakerState, CircuitBreaker, FailureShare
from services.reward.judge.calls.breaker import WINDOW as FAILURE_WINDOW
from services.reward.judge.calls.limiter import DECREASE, AimdLimiter
from services.reward.remote.retries import RESERVE, ShareBudget, retry_s


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def round_trip(limiter: AimdLimiter, clock: Clock, seconds: float, crowded: bool = False) -> None:
    """Fills the limit, waits, and ends all."""
    began = [limiter.acquire() for _ in range(limiter.limit)]
    clock.now += seconds
    for start in began:
        limiter.release(start, crowded=crowded)


def test_the_limit_rises_fast_until_the_first_cut_and_then_grows_by_one_a_round_trip() -> None:
    clock = Clock()
    limiter = AimdLimiter(4, 100, 1.0, clock)
    for _ in range(3):
        before = limiter.limit
        round_trip(limiter, clock, 0.5)
        assert 1.4 * before < limiter.limit + 1 <= 2 * before + 1  # of a crowd that leaves, the last do not use it
    before = limiter.limit
    round_trip(limiter, clock, 2.0)
    cut = limiter.limit
    assert cut == int(before * DECREASE)
    round_trip(limiter, clock, 0.5)
    assert cut <= limiter.limit <= cut + 1


@pytest.mark.parametrize(("seconds", "crowded"), [(2.0, False), (0.1, True)], ids=["slow", "refused"])
def test_calls_of_one_crowd_cut_once(seconds: float, crowded: bool) -> None:
    clock = Clock()
    limiter = AimdLimiter(10, 100, 1.0, clock)
    round_trip(limiter, clock, seconds, crowded)
    assert limiter.limit == 7
    round_trip(limiter, clock, seconds, crowded)
    assert limiter.limit == 4


def test_an_idle_limit_does_not_grow() -> None:
    clock = Clock()
    limiter = AimdLimiter(10, 100, 1.0, clock)
    for _ in range(50):
        began = limiter.acquire()
        clock.now += 0.1
        limiter.release(began)
    assert limiter.limit == 10


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.booleans(), st.booleans()), max_size=80), st.integers(1, 8))
@settings(deadline=None, max_examples=20)
def test_the_limit_stays_within_its_bounds_and_places_are_not_lost(
    steps: list[tuple[float, bool, bool]], maximum: int
) -> None:
    clock = Clock()
    limiter = AimdLimiter(4, maximum, 1.0, clock)
    taken: list[float] = []
    for seconds, crowded, counts in steps:
        clock.now += seconds
        if limiter.has_room:
            taken.append(limiter.acquire())
        elif taken:
            limiter.release(taken.pop(0), crowded=crowded, counts=counts)
        assert 1 <= limiter.limit <= maximum
        assert limiter.in_flight == len(taken)


def test_the_breaker_opens_probes_once_and_closes() -> None:
    clock = Clock()
    breaker = CircuitBreaker(3, 5.0, 15.0, clock)
    for _ in range(2):
        breaker.fail(breaker.begin())
    breaker.succeed(breaker.begin())
    for _ in range(3):
        assert breaker.state is BreakerState.CLOSED
        breaker.fail(breaker.begin())
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows
    clock.now = 4.9
    assert breaker.wait_s == pytest.approx(0.1)
    clock.now = 5.0
    assert breaker.state is BreakerState.HALF_OPEN
    probe = breaker.begin()
    assert probe
    assert not breaker.allows
    breaker.succeed(False)  # a call that began before it opened says nothing of now
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.fail(probe)
    assert breaker.wait_s == 10.0
    clock.now += 10.0
    breaker.fail(breaker.begin())
    assert breaker.wait_s == 15.0
    clock.now += 15.0
    breaker.forget(breaker.begin())
    assert breaker.allows
    breaker.succeed(breaker.begin())
    assert breaker.state is BreakerState.CLOSED
    for _ in range(3):
        breaker.fail(breaker.begin())
    assert breaker.wait_s == 5.0


@given(st.floats(0.0, 1.0), st.lists(st.booleans(), max_size=300))
@settings(deadline=None, max_examples=20)
def test_a_budget_never_gives_more_than_its_share_and_reserve(share: float, steps: list[bool]) -> None:
    budget = ShareBudget(share)
    calls = granted = 0
    for deposit in steps:
        if deposit:
            budget.deposit()
            calls += 1
        else:
            granted += budget.withdraw()
        assert granted <= RESERVE + share * calls + 1e-6


def test_a_share_of_nothing_gives_nothing_and_a_share_is_reached() -> None:
    none, half = ShareBudget(0.0), ShareBudget(0.5)
    granted = 0
    for _ in range(1000):
        none.deposit()
        half.deposit()
        granted += half.withdraw()
    assert not none.withdraw()
    assert 500 <= granted <= 500 + RESERVE


@given(st.integers(0, 1000), st.none() | st.floats(0.0, 30.0), st.integers())
@settings(deadline=None, max_examples=20)
def test_backoff_is_within_its_bounds(attempt: int, asked: float | None, seed: int) -> None:
    seconds = retry_s(attempt, 0.2, 10.0, asked, random.Random(seed))
    assert (asked or 0.0) <= seconds <= (asked or 0.0) + min(10.0, 0.2 * 2.0 ** min(attempt, 10))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60), st.integers(0, 4))
@settings(deadline=None, max_examples=20)
def test_the_cache_keeps_what_was_used_last(steps: list[tuple[int, bool]], size: int) -> None:
    cache: LruCache[bytes, int] = LruCache(size)
    model: OrderedDict[int, int] = OrderedDict()
    for number, (key, put) in enumerate(steps):
        if put:
            cache.put(bytes([key]), number)
            model.pop(key, None)
            model[key] = number
            while len(model) > size:
                model.pop(next(iter(model)))
        else:
            assert cache.get(bytes([key])) == model.get(key)
            if key in model:
                model.move_to_end(key)
        assert len(cache) == len(model)


@given(st.lists(st.tuples(st.integers(0, FAILURE_WINDOW + 50), st.booleans()), max_size=2 * FAILURE_WINDOW))
@settings(deadline=None, max_examples=10)
def test_the_share_of_failures_is_that_of_the_latest_questions(answers: list[tuple[int, bool]]) -> None:
    share = FailureShare(0.1)
    known: dict[int, bool] = {}
    for question, failed in answers:
        share.observe(question.to_bytes(2), failed)
        known.pop(question, None)
        known[question] = failed
    latest = list(known.values())[-FAILURE_WINDOW:]
    assert bool(share.excess) == (len(latest) >= LEAST and sum(latest) > 0.1 * len(latest))
