"""Checks of media: broken, of other kinds, huge, big, and many bytes in one call."""

from collections.abc import Callable

import grpc.aio

from flowfleet.conformance import media
from flowfleet.conformance.checks import Fault, Remark, Skip, check, outcome, require, require_scores, said
from flowfleet.conformance.scoring import EACH, ONE
from flowfleet.conformance.session import Session, by_id
from flowfleet.media.text import TEXT_TYPE
from flowfleet.proto.reward_pb2 import RewardSample, RewardScore

_UNKNOWN_TYPE = "application/x-unheard-of"


@check(
    "broken media",
    "undecodable media get an error of their own, while others of the call are scored",
    ONE,
    EACH,
)
async def broken(session: Session) -> str | None:
    return await _one_bad(session, media.garbage(session.sample(0).media_type))


@check("truncated media", "a file of which half is missing gets an error of its own", ONE, EACH)
async def truncated(session: Session) -> str | None:
    file = session.media(1)
    if file[1] == TEXT_TYPE:
        raise Skip("half a text is a text")
    score = await _beside_others(session, media.truncated(file))
    if score.WhichOneof("outcome") == "score":
        raise Remark(f"it was scored: {outcome(score)}")
    return outcome(score)


@check("unknown media type", "a media type that is not read gets an error of its own", ONE, EACH)
async def unknown_type(session: Session) -> str | None:
    return await _one_bad(session, (session.media(1)[0], _UNKNOWN_TYPE))


@check("huge picture", "a header that promises 30,000 x 30,000 pixels gets an error; the service lives on", ONE, EACH)
async def huge(session: Session) -> str | None:
    _require_pictures(session)
    samples = session.samples(session.few)
    samples[-1] = session.with_media(samples[-1], media.huge_picture())
    try:
        scores = by_id((await session.score(samples)).scores)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            raise Fault(said(error)) from None
        told = said(error)
    else:
        score = scores.get(samples[-1].sample_id, RewardScore())
        told = outcome(score)
        require(score.WhichOneof("outcome") == "error", f"{told}; it must get an error")
    samples = session.samples(session.few)
    try:
        scores = await session.scores(samples)
    except grpc.aio.AioRpcError as error:
        raise Fault(f"the next call ended with {said(error)}") from None
    require_scores(scores, [samples[0].sample_id])
    return told


@check("big picture", "a picture of 2048 x 2048 is scored, or gets an error that tells the limit", ONE)
async def big(session: Session) -> str | None:
    _require_pictures(session)
    samples = session.samples(session.few)
    samples[-1] = session.with_media(samples[-1], media.big_picture())
    return await _scored(session, samples)


@check("jpeg", "a JPEG is scored, or gets an error that tells what is read", ONE)
async def jpeg(session: Session) -> str | None:
    _require_pictures(session)
    samples = [session.with_media(sample, media.picture(0, "image/jpeg")) for sample in session.samples(session.few)]
    return await _scored(session, samples)


@check("large call", "a call of 31 MiB is taken: the controller sends as much", ONE, EACH)
async def large_call(session: Session) -> str | None:
    _require_pictures(session)
    count = max(session.few, min(8, session.full_batch))
    samples = [
        session.with_media(sample, media.padded(media.picture(0), session.options.large_call_bytes // count))
        for sample in session.samples(count)
    ]
    try:
        return await _scored(session, samples)
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED):
            hint = "raise the limit of a message that the server receives, 4 MiB where none is set, to 64 MiB"
            raise Fault(f"{said(error)}; {hint}") from None
        raise


@check("the other modality", "each modality is scored where modalities name it, and gets an error elsewhere", ONE, EACH)
async def other_modality(session: Session) -> str | None:
    others = (
        ("a picture", session.takes_pictures, media.picture),
        ("a video", session.takes_videos, media.video),
        ("a text", session.takes_texts, media.answer),
        ("a sound", session.takes_sounds, media.wave),
    )
    own = session.media(0)[1].partition("/")[0]
    told = [await _other(session, *other) for other in others if other[2](0)[1].partition("/")[0] != own]
    return "; ".join(told)


async def _other(session: Session, name: str, is_taken: bool, make: Callable[[int], media.Media]) -> str:
    """Sends a medium of another modality than the suite's and returns the outcome."""
    if not is_taken:
        return f"{name}: {await _one_bad(session, make(0))}"
    samples = [session.with_media(sample, make(index)) for index, sample in enumerate(session.samples(session.few))]
    scores = await session.scores(samples)
    require_scores(scores, [samples[0].sample_id])
    return f"{name}: {outcome(scores[samples[0].sample_id])}"


def _require_pictures(session: Session) -> None:
    if not session.takes_pictures:
        raise Skip("it scores no pictures")


async def _one_bad(session: Session, file: media.Media) -> str:
    """Fault unless the sample with the file gets an error, and its neighbors a score."""
    score = await _beside_others(session, file)
    require(score.WhichOneof("outcome") == "error", f"the bad sample: {outcome(score)}; it must get an error")
    require(score.error, "its error is empty: say why there is no score")
    return outcome(score)


async def _beside_others(session: Session, file: media.Media) -> RewardScore:
    """Scores a sample with this file, as the second of three if so many fit. Raises Fault unless the others are
    scored."""
    samples = session.samples(min(3, session.full_batch))
    bad = len(samples) // 2
    samples[bad] = session.with_media(samples[bad], file)
    try:
        scores = by_id((await session.score(samples)).scores)
    except grpc.aio.AioRpcError as error:
        raise Fault(f"the whole call ended with {said(error)}; give an error to that sample alone") from None
    require_scores(scores, [sample.sample_id for index, sample in enumerate(samples) if index != bad])
    return scores.get(samples[bad].sample_id, RewardScore())


async def _scored(session: Session, samples: list[RewardSample]) -> str | None:
    """Fault for no outcome at all, Remark for an error of the last sample."""
    scores = by_id((await session.score(samples)).scores)
    score = scores.get(samples[-1].sample_id, RewardScore())
    require(score.WhichOneof("outcome"), outcome(score))
    if score.WhichOneof("outcome") == "error":
        raise Remark(outcome(score))
    return outcome(score)
