"""Checks of calls that a service must refuse, with a code and a message that says what to change."""

from grpc import StatusCode

from flowfleet.conformance.checks import Remark, Skip, check, outcomes, require, require_refused
from flowfleet.conformance.scoring import ONE
from flowfleet.conformance.session import Session
from flowfleet.proto.reward_pb2 import ScoreResponse

_PARAM = "no_such_param"


@check("too many samples", "more than max_batch_size samples: INVALID_ARGUMENT or RESOURCE_EXHAUSTED", ONE)
async def too_many(session: Session) -> str | None:
    limit = session.described.max_batch_size
    if limit == 0 or limit > session.options.max_batch:
        raise Skip(f"max_batch_size is {limit or 'not named'}")
    answer = await session.ask(session.samples(limit + 1))
    return require_refused(answer, StatusCode.INVALID_ARGUMENT, StatusCode.RESOURCE_EXHAUSTED)


@check("duplicate ids", "two samples of one id: INVALID_ARGUMENT", ONE)
async def duplicate_ids(session: Session) -> str | None:
    if session.full_batch < 2:
        raise Skip("a call takes one sample")
    samples = [session.sample(index, "twice") for index in range(2)]
    return require_refused(await session.ask(samples), StatusCode.INVALID_ARGUMENT)


@check("empty id", "a sample without an id: INVALID_ARGUMENT", ONE)
async def empty_id(session: Session) -> str | None:
    samples = session.samples(session.few)
    samples[0].sample_id = ""
    return require_refused(await session.ask(samples), StatusCode.INVALID_ARGUMENT)


@check("empty call", "no samples: INVALID_ARGUMENT, or an empty answer", ONE)
async def empty_call(session: Session) -> str | None:
    answer = await session.ask([])
    if isinstance(answer, ScoreResponse):
        require(not answer.scores, f"nothing was asked, and answered is {outcomes(answer)}")
        return "an empty answer"
    return require_refused(answer, StatusCode.INVALID_ARGUMENT)


@check("unknown param", "a parameter that it does not know: INVALID_ARGUMENT, so that a misspelt one is noticed", ONE)
async def unknown_param(session: Session) -> str | None:
    answer = await session.ask(session.samples(session.few), {_PARAM: "1"})
    message = require_refused(answer, StatusCode.INVALID_ARGUMENT)
    if _PARAM not in message:
        raise Remark(f"the message does not name the parameter: {message}")
    return message
