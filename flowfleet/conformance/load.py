"""Checks of calls that are left by their callers, and of many at once."""

from __future__ import annotations

import asyncio
import time

import grpc.aio
from grpc import StatusCode

from flowfleet.conformance.checks import Fault, check, require, said
from flowfleet.conformance.scoring import EACH, ONE, ORDER, compare
from flowfleet.conformance.session import GROUP, Session

NUM_ABANDONED = 6
NUM_AT_ONCE = 16
_LEFT_AFTER_S = 0.25


@check("deadline", f"{NUM_ABANDONED} calls past their deadline do not hold up the next one", ONE)
async def deadline(session: Session) -> str | None:
    codes = await session.abandon(NUM_ABANDONED, _LEFT_AFTER_S, cancel=False)
    other = [code for code in codes if code not in (None, StatusCode.DEADLINE_EXCEEDED, StatusCode.RESOURCE_EXHAUSTED)]
    require(not other, f"a call past its deadline ended with {other[0].name if other and other[0] else ''}")
    return await _next_call(session, f"{codes.count(StatusCode.DEADLINE_EXCEEDED)} passed their deadline")


@check("cancellation", f"{NUM_ABANDONED} cancelled calls do not hold up the next one", ONE)
async def cancellation(session: Session) -> str | None:
    answered = await session.abandon(NUM_ABANDONED, _LEFT_AFTER_S, cancel=True)
    return await _next_call(session, f"{NUM_ABANDONED - len(answered)} were cancelled")


@check("many at once", f"{NUM_AT_ONCE} calls at once are each answered with their own scores", ONE, EACH, ORDER)
async def many_at_once(session: Session) -> str | None:
    places = list(session.reference) or list(range(min(GROUP, session.full_batch)))

    async def one(number: int) -> None:
        turned = places[number % len(places) :] + places[: number % len(places)]
        mine = turned if session.described.needs_group else turned[: 1 + number % 3]
        scores = await session.scores([session.sample(place) for place in mine])
        if session.reference:
            compare(session, mine, scores)

    start = time.monotonic()
    try:
        await asyncio.gather(*(one(number) for number in range(NUM_AT_ONCE)))
    except grpc.aio.AioRpcError as error:
        raise Fault(said(error)) from None
    return f"{NUM_AT_ONCE} calls in {time.monotonic() - start:.2f} s"


@check("afterwards", "after all this it serves as before", ONE, "health")
async def afterwards(session: Session) -> str | None:
    require(await session.health() == "SERVING", "health no longer says SERVING")
    return f"one call took {await _timed(session):.3f} s"


async def _next_call(session: Session, told: str) -> str:
    """Fault where the next call waits for those that were left."""
    seconds, allowed = await _timed(session), session.options.allowed_s + session.batch_s
    message = f"the next call took {seconds:.1f} s, where {allowed:.1f} s would do: stop what nobody waits for"
    require(seconds <= allowed, message)
    return f"{told}; the next call took {seconds:.3f} s"


async def _timed(session: Session) -> float:
    try:
        return await session.seconds(session.samples(session.few))
    except grpc.aio.AioRpcError as error:
        raise Fault(f"the next call ended with {said(error)}") from None


CHECKS = (many_at_once, deadline, cancellation)
LAST = (afterwards,)
