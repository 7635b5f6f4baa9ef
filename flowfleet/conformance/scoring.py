"""Checks of Score's answers to well-formed calls."""

import math
import random
from collections import Counter
from typing import Any

import grpc.aio

from flowfleet.conformance.checks import Fault, Remark, Skip, alike, check, outcome, require, require_scores, said
from flowfleet.conformance.session import GROUP, Session, by_id
from flowfleet.proto.reward_pb2 import RewardScore, ScoreRequest, ScoreResponse
from flowfleet.rewards.requests import SERVICE_NAME

ONE, EACH, SAME, ORDER = "one sample", "each id once", "same again", "order and company"
_KIND = "give --prompt, --metadata, --param or --image of the kind that it scores"
NUM_COMPARED = 6
BLIND = "all samples have one score, so that exchanged ones would not show: give several --image"
_UNKNOWN_FIELD = b"\xf2\x7f\x03new"
"""Field 2046 of wire type 2: of a contract that is not written yet."""


@check(ONE, "a sample of the kind that it scores gets a score", "describe")
async def one_sample(session: Session) -> str | None:
    samples = session.samples(session.few)
    try:
        response = await session.score(samples)
    except grpc.aio.AioRpcError as error:
        raise Fault(f"{said(error)}; {_KIND}") from None
    session.given.extend(response.scores)
    scores = by_id(response.scores)
    require(samples[0].sample_id in scores, f"sample {samples[0].sample_id!r} is missing in the answer")
    score = scores[samples[0].sample_id]
    require(score.WhichOneof("outcome") in ("score", "pending"), f"{outcome(score)}; {_KIND}")
    if score.HasField("pending"):
        raise Remark(f"{outcome(score)}: what is asked of scores is not asked of pending ones")
    return outcome(score)


@check("full batch", "a call of max_batch_size samples is answered", ONE)
async def full_batch(session: Session) -> str | None:
    count = session.full_batch
    try:
        session.batch_s = await session.seconds(session.samples(count))
    except grpc.aio.AioRpcError as error:
        session.batch_limit = max(session.few, count // 2)
        raise Fault(f"{count} samples: {said(error)}") from None
    rate = count / max(session.batch_s, 1e-9)
    told = f"{count} samples in {session.batch_s:.2f} s, {rate:.3g} a second"
    if count < session.described.max_batch_size:
        raise Remark(f"{told}; more were not sent, the limit is {session.described.max_batch_size}")
    return told


@check(EACH, "each sample of a call of any size is answered once, under its own id, by a score or an error", ONE)
async def each_id_once(session: Session) -> str | None:
    count = session.full_batch
    samples = [session.sample(index, name) for index, name in enumerate(odd_names(count))]
    ids = [sample.sample_id for sample in samples]
    response = await session.score(samples)
    session.given.extend(response.scores)
    answered = Counter(score.sample_id for score in response.scores)
    missing = [name for name in ids if not answered[name]]
    strange = [name for name in answered if name not in ids]
    twice = [name for name, times in answered.items() if times > 1]
    first = ids.index(missing[0]) + 1 if missing else 0
    require(not missing, f"{len(missing)} of {count} are missing, first sample {first}, {missing and missing[0]!r}")
    require(not strange, f"{strange and strange[0]!r} was not asked for")
    require(not twice, f"{twice and twice[0]!r} is answered {answered[twice[0]] if twice else 0} times")
    empty = [at for at, name in enumerate(ids) if by_id(response.scores)[name].WhichOneof("outcome") is None]
    require(not empty, f"{len(empty)} of {count} have neither score nor error, first sample {empty and empty[0] + 1}")
    return f"{count} ids"


def odd_names(count: int) -> list[str]:
    """Returns ids in no order, with unusual characters that ids may hold."""
    return [f"job/{(7919 * number) % 1009} ü:{number}" for number in range(count)]


@check(SAME, "the same call gets the same scores, within the tolerance", ONE, EACH)
async def same_again(session: Session) -> str | None:
    samples = session.samples(min(NUM_COMPARED, session.full_batch))
    first, second = await session.scores(samples), await session.scores(samples)
    pairs = [(first.get(sample.sample_id), second.get(sample.sample_id)) for sample in samples]
    values = [(left.score, right.score) for left, right in pairs if left and right and is_score(left, right)]
    differences = [abs(left - right) for left, right in values if not alike(left, right, session.options.tolerance)]
    if differences:
        raise Remark(f"{len(differences)} of {len(values)} differ, by {max(differences):.3g} at most: scores are noisy")
    session.reference = {index: score.score for index, (score, _) in enumerate(pairs) if score and is_score(score)}
    if not values:
        raise Remark("no two finite scores to compare")
    return f"{len(values)} samples"


@check(ORDER, "a score goes with its sample, whatever other samples are in the call", ONE, EACH, SAME)
async def order(session: Session) -> str | None:
    if len(session.reference) < 2:
        raise Skip("there are not two scores that repeat")
    places = list(session.reference)
    random.Random(7).shuffle(places)
    places.reverse()
    parts = [places] if session.described.needs_group else [places[:-2], places[-2:]]
    for part in filter(None, parts):
        compare(session, part, await session.scores([session.sample(index) for index in part]))
    if is_blind(session):
        raise Remark(BLIND)
    return f"{len(places)} samples in another order" + ("" if len(parts) == 1 else ", in two calls")


def compare(session: Session, indices: list[int], scores: dict[str, RewardScore]) -> None:
    """Fault where a score is not that of the first batch."""
    for index in indices:
        name, expected = session.sample(index).sample_id, session.reference[index]
        score = scores.get(name, RewardScore())
        same = is_score(score) and alike(score.score, expected, session.options.tolerance)
        require(same, f"{name!r}: {outcome(score)}, before {expected:g}")


@check("finite", "no score is NaN or infinite: such a sample gets an error", ONE, is_last=True)
async def finite(session: Session) -> str | None:
    for given in session.given:
        require(math.isfinite(given.score), f"{given.sample_id!r}: {outcome(given)}")
    return f"{len(session.given)} scores"


@check("in range", "scores are between score_min and score_max", ONE, "score range", is_last=True)
async def in_range(session: Session) -> str | None:
    low, high = session.described.score_min, session.described.score_max
    slack = session.options.tolerance * max(1.0, *(abs(end) for end in (low, high) if math.isfinite(end)), 0.0)
    for given in session.given:
        if given.WhichOneof("outcome") == "score" and math.isfinite(given.score):
            require(
                low - slack <= given.score <= high + slack,
                f"{given.sample_id!r}: {outcome(given)}, not {low:g} to {high:g}",
            )
    values = [given.score for given in session.given if is_score(given)]
    if not values:
        raise Skip("no score is finite")
    return f"{min(values):.4g} to {max(values):.4g}"


@check("components", "components are finite, and among those that Describe names", ONE, is_last=True)
async def components(session: Session) -> str | None:
    named = set(session.described.components)
    for given in session.given:
        for name, value in given.components.items():
            require(name in named, f"{name!r} is not among those of Describe: {', '.join(sorted(named)) or 'none'}")
            require(math.isfinite(value), f"{given.sample_id!r}: {name} is {value}")
    seen = sorted({name for given in session.given for name in given.components})
    if not seen:
        raise Skip(f"no score has any; Describe names {', '.join(sorted(named)) or 'none'}")
    return ", ".join(seen)


@check("groups", "several groups in one call are answered, each as if alone", ONE, EACH, ORDER)
async def groups(session: Session) -> str | None:
    size = min(GROUP, session.full_batch // 2)
    if size < 1 or (session.described.needs_group and size < 2):
        raise Skip(f"two groups do not fit in a call of {session.full_batch}")
    both = [session.sample(index, f"{name}/{index}", name) for index in range(size) for name in ("left", "right")]
    scores = await session.scores(both)
    require_scores(scores, [sample.sample_id for sample in both])
    for index in range(size if session.reference else 0):
        left, right = (scores[f"{name}/{index}"].score for name in ("left", "right"))
        same = alike(left, right, session.options.tolerance)
        require(same, f"equal groups have other scores: sample {index} {left:g} and {right:g}")
    return f"two groups of {size}"


@check("unicode", "prompts and metadata hold any text", ONE)
async def unicode(session: Session) -> str | None:
    samples = session.samples(session.few)
    for sample in samples:
        sample.prompt += " — 漢字, العربية, עברית, हिन्दी, 🎨👩‍👩‍👧, e\u0301, \u202eabc\u202c, tab\tand\nline"
        sample.metadata["ключ 🔑"] = "значение\n☃"
        sample.metadata["empty"] = ""
    require_scores(await session.scores(samples), [samples[0].sample_id])
    return None


@check("long prompt", "a prompt of 20,000 characters is scored, or gets an error of its own", ONE)
async def long_prompt(session: Session) -> str | None:
    samples = session.samples(session.few)
    for sample in samples:
        sample.prompt += " and more" * 2300
    scores = await session.scores(samples)
    first = scores.get(samples[0].sample_id, RewardScore())
    require(first.WhichOneof("outcome"), f"{samples[0].sample_id!r}: {outcome(first)}")
    if first.WhichOneof("outcome") == "error":
        raise Remark(outcome(first))
    return None


@check("newer fields", "fields of a later contract are ignored", ONE)
async def newer_fields(session: Session) -> str | None:
    request = ScoreRequest(samples=session.samples(session.few), params=session.options.params)
    call: Any = session.channel.unary_unary(
        f"/{SERVICE_NAME}/Score",
        request_serializer=lambda sent: sent.SerializeToString() + _UNKNOWN_FIELD,
        response_deserializer=ScoreResponse.FromString,
    )
    response = await call(request, timeout=session.options.timeout_s)
    require(response.scores, "the answer is empty")
    return None


def is_blind(session: Session) -> bool:
    return len({round(score, 9) for score in session.reference.values()}) == 1


def is_score(*given: RewardScore) -> bool:
    """Finite ones."""
    return all(score.WhichOneof("outcome") == "score" and math.isfinite(score.score) for score in given)


@check("pending", "a pending score says what it waits for, and Describe names contract 2", ONE, is_last=True)
async def pending(session: Session) -> str | None:
    waiting = [given for given in session.given if given.WhichOneof("outcome") == "pending"]
    if not waiting:
        return "no score is pending"
    silent = [given.sample_id for given in waiting if not given.pending]
    require(not silent, f"{silent and silent[0]!r}: pending is empty, say what the score waits for")
    number = session.described.contract
    require(number >= 2, f"Describe names contract {number}: name 2, so that controllers that cannot wait refuse it")
    return f"{len(waiting)} of {len(session.given)} scores"
