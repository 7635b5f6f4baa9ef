"""Checks of the largest calls, of many at once, and of calls that are left by their callers.

Scores exchanged in a large call train on noise, and no count and no id shows it.
"""

import asyncio
import random
import time

import grpc.aio
from grpc import StatusCode

from flowfleet.conformance.checks import Fault, Remark, Skip, alike, check, outcome, require, require_scores, said
from flowfleet.conformance.scoring import (
    BLIND,
    EACH,
    NUM_COMPARED,
    ONE,
    ORDER,
    SAME,
    compare,
    is_blind,
    is_score,
    odd_names,
)
from flowfleet.conformance.session import GROUP, Session
from flowfleet.proto.reward_pb2 import RewardScore


@check(
    "large call in order", "a score of the largest call is that of the sample in a small one", ONE, EACH, SAME, ORDER
)
async def large_order(session: Session) -> str | None:
    if session.full_batch <= NUM_COMPARED:
        raise Skip(f"a call takes {session.full_batch} samples, as many as were compared already")
    if len(session.reference) < 2:
        raise Skip("there are not two scores that repeat")
    known = list(session.reference)
    indices = known * (session.full_batch // len(known))
    if not session.described.needs_group:
        random.Random(11).shuffle(indices)
    names = odd_names(len(indices))
    samples = [
        session.sample(index, name, f"group {number // len(known)}")
        for number, (index, name) in enumerate(zip(indices, names, strict=True))
    ]
    scores = await session.scores(samples)
    for number, (index, name) in enumerate(zip(indices, names, strict=True), 1):
        given, expected = scores.get(name, RewardScore()), session.reference[index]
        same = is_score(given) and alike(given.score, expected, session.options.tolerance)
        require(same, f"sample {number} of {len(indices)}: {outcome(given)}, in a small call {expected:g}")
    if is_blind(session):
        raise Remark(BLIND)
    return f"{len(indices)} samples"


@check("media size", "media_size, if set, is the size of the sample's media", ONE, EACH)
async def media_size(session: Session) -> str | None:
    samples = session.samples(session.full_batch)
    scores = await session.scores(samples)
    sizes = [scores.get(sample.sample_id, RewardScore()).media_size for sample in samples]
    for number, (size, sample) in enumerate(zip(sizes, samples, strict=True), 1):
        message = f"sample {number} has {len(sample.media)} bytes, and its score is of {size}: were scores exchanged?"
        require(size in (0, len(sample.media)), message)
    if not any(sizes):
        raise Remark("not told: exchanged scores would not show while a job runs")
    return f"told of {sum(map(bool, sizes))} of {len(sizes)} scores"


NUM_AT_ONCE = 16
_LEFT_AFTER_S = 0.25
"""At most; sooner where a full batch takes less."""
_SOONEST_S = 0.02
AGAIN_S = 0.05


@check("many at once", f"{NUM_AT_ONCE} calls at once are each answered with their own scores", ONE, EACH, ORDER)
async def many_at_once(session: Session) -> str | None:
    places = list(session.reference) or list(range(min(GROUP, session.full_batch)))

    async def one(number: int) -> None:
        turned = places[number % len(places) :] + places[: number % len(places)]
        mine = turned if session.described.needs_group else turned[: 1 + number % 3]
        samples = [session.sample(index) for index in mine]
        scores = await session.scores(samples)
        require_scores(scores, [sample.sample_id for sample in samples])
        if session.reference:
            compare(session, mine, scores)

    start = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(NUM_AT_ONCE)))
    told = f"{NUM_AT_ONCE} calls in {time.monotonic() - start:.2f} s"
    if not session.reference:
        raise Remark(f"{told}; no score repeats, so that those of another call would not show")
    return told


@check("deadline", "calls past their deadline, by the hundred, do not hold up the next one", ONE)
async def deadline(session: Session) -> str | None:
    codes = await session.abandon(_left_after_s(session), cancel=False)
    other = [code for code in codes if code not in (None, StatusCode.DEADLINE_EXCEEDED, StatusCode.RESOURCE_EXHAUSTED)]
    require(not other, f"a call past its deadline ended with {other[0].name if other and other[0] else ''}")
    return await _next_call(session, codes, StatusCode.DEADLINE_EXCEEDED, "passed their deadline")


@check("cancellation", "cancelled calls, by the hundred, do not hold up the next one", ONE)
async def cancellation(session: Session) -> str | None:
    codes = await session.abandon(_left_after_s(session), cancel=True)
    return await _next_call(session, codes, StatusCode.CANCELLED, "were cancelled")


@check("afterwards", "after all this it serves as before", ONE, "health", is_last=True)
async def afterwards(session: Session) -> str | None:
    require(await session.health() == "SERVING", "health no longer says SERVING")
    return f"one call took {await _timed(session):.3f} s"


def _left_after_s(session: Session) -> float:
    """The time of a full batch, so that a fast service has calls under way too."""
    return max(_SOONEST_S, min(_LEFT_AFTER_S, session.batch_s))


async def _next_call(session: Session, codes: list[StatusCode | None], left: StatusCode, told: str) -> str:
    """Raises Fault if the next call waits for the abandoned ones; Remark if none was abandoned."""
    seconds, allowed = await _timed(session), session.options.allowed_s + session.batch_s
    message = (
        f"the next call took {seconds:.1f} s, allowed are {allowed:.1f} s: stop calls that were cancelled, or give the "
        "service more threads"
    )
    require(seconds <= allowed, message)
    summary = f"{codes.count(left)} of {len(codes)} {told}; the next call took {seconds:.3f} s"
    if left not in codes:
        raise Remark(f"{summary}: nothing was tested, all were answered or refused sooner")
    return summary


async def _timed(session: Session) -> float:
    """Seconds until a call is answered. One that is refused for want of a thread is tried again for the allowed time:
    some servers cannot see a cancellation, and free the threads of cancelled calls late."""
    began = time.monotonic()
    while True:
        try:
            await session.seconds(session.samples(session.few))
            return time.monotonic() - began
        except grpc.aio.AioRpcError as error:
            is_over = time.monotonic() - began > session.options.allowed_s + session.batch_s
            if error.code() is not StatusCode.RESOURCE_EXHAUSTED or is_over:
                hint = ": all of its threads have calls; give it more" if is_over else ""
                raise Fault(f"the next call ended with {said(error)}{hint}") from None
        await asyncio.sleep(AGAIN_S)
