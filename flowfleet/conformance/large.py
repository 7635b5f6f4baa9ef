"""Checks of the largest calls: scores exchanged there train on noise, and no count and no id shows it."""

from __future__ import annotations

import random

from flowfleet.conformance.checks import Remark, Skip, alike, check, outcome, require
from flowfleet.conformance.scoring import BLIND, EACH, NUM_COMPARED, ONE, ORDER, SAME, is_blind, is_score, odd_names
from flowfleet.conformance.session import Session
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


CHECKS = (large_order, media_size)
