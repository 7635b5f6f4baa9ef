"""Checks of gradients: are they there, are they those of the score, and does each picture get its own?

Whether they are right is seen by finite differences: along a gradient g, cut to some of the pixels and called d, the
score must rise by g · d per unit. The pictures lie well inside 0 to 1, so that no limit of the pixels is met.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import grpc
import grpc.aio
import numpy as np

from flowfleet.conformance.checks import Fault, Remark, Skip, alike, check, require, said
from flowfleet.conformance.session import Session
from flowfleet.media.files import decode_media
from flowfleet.proto.reward_pb2 import PixelScore
from flowfleet.rewards.gradients import PixelInput, Pixels, read_gradient

PICTURES: Final = 3
STEPS: Final = (0.05, 0.02, 0.008, 0.003, 0.001)
"""Largest change of a pixel, of 0 to 1: a large one shows in a rounded score, a small one in a bent score."""
TOLERANCE: Final = 0.1
"""Between the score's rise and the gradient's, relative to the latter, at the best of the steps."""
ALONE_TOLERANCE: Final = 0.02
"""Maximum difference between the gradients of a picture alone and in a call with others, relative to the longer one."""
LARGE_SIDE: Final = 1024
_MARGIN: Final = 0.1


@dataclass(frozen=True)
class _Gradient:
    score: float
    gradient: Pixels


@check("no gradients", "ScoreWithGradient ends with UNIMPLEMENTED where gives_gradient is not set", "describe")
async def not_promised(session: Session) -> str | None:
    if session.described.gives_gradient:
        raise Skip("gives_gradient is set")
    try:
        await session.score_with_gradient([PixelInput(np.full((3, 8, 8), 0.5, np.float32), "", {}, "gradient/0")])
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return None
        raise Remark(f"it ends with {said(error)}, and no caller asks for it") from None
    raise Remark("it is answered: say gives_gradient and contract 2, so that jobs may train on it")


@check("gradient contract", "gives_gradient goes with contract 2 and pictures", "describe", "contract")
async def promised(session: Session) -> str | None:
    _need(session)
    require(session.described.contract >= 2, "contract is below 2: callers that know no gradients would not tell them")
    require(session.takes_pictures, "it scores no pictures, and only those have gradients")
    require(not session.described.needs_group, "needs_group is set, and a gradient is of one picture alone")
    return None


@check("gradients", "a score or an error a sample, and a finite gradient of the pixels' shape", "gradient contract")
async def given(session: Session) -> str | None:
    _need(session)
    scored = await _asked(session, _pictures(session))
    return f"{len(scored)} pictures: " + ", ".join(f"score {item.score:g}" for item in scored)


@check("gradient is right", "the score rises along the gradient as fast as that says", "gradients")
async def right(session: Session) -> str | None:
    _need(session)
    seen: list[str] = []
    for sample in _pictures(session):
        (scored,) = await _asked(session, [sample])
        if not scored.gradient.any():
            continue
        for name, mask in _masks(scored.gradient):
            seen.append(await _compare(session, sample, scored, scored.gradient * mask, name))
    if not seen:
        raise Remark("every gradient is zero: no job can learn from these pictures")
    return seen[0]


@check("gradient of each", "a gradient depends on its own picture alone", "gradients")
async def alone(session: Session) -> str | None:
    _need(session)
    pictures = _pictures(session)
    together = await _asked(session, pictures)
    for sample, grouped in zip(pictures, together, strict=True):
        (single,) = await _asked(session, [sample])
        require(
            alike(single.score, grouped.score, session.options.tolerance),
            f"score {single.score:g} alone, {grouped.score:g} with others",
        )
        longer = max(float(np.linalg.norm(single.gradient)), float(np.linalg.norm(grouped.gradient)))
        apart = float(np.linalg.norm(single.gradient - grouped.gradient))
        require(
            apart <= ALONE_TOLERANCE * longer,
            f"the gradient of {sample.sample_id!r} is another alone than in a call of {len(pictures)}",
        )
    return None


@check("gradient score", "of one picture ScoreWithGradient and Score give nearly the same score", "gradients")
async def as_score(session: Session) -> str | None:
    _need(session)
    sample = session.sample(0)
    pixels = np.ascontiguousarray(_decoded(session, 0))
    exact = PixelInput(pixels, sample.prompt, dict(sample.metadata), sample.sample_id)
    (scored,) = await _asked(session, [exact])
    plain = (await session.scores([sample]))[sample.sample_id]
    if plain.WhichOneof("outcome") != "score":
        raise Skip("Score gave no score")
    if not alike(plain.score, scored.score, 0.05):
        raise Remark(f"Score says {plain.score:g}, ScoreWithGradient {scored.score:g}: charts show the first")
    return f"{plain.score:g} and {scored.score:g}"


@check(
    "broken pixels",
    "a sample whose pixels are not a picture gets an error, and the others their gradients",
    "gradients",
)
async def broken(session: Session) -> str | None:
    _need(session)
    good = _pictures(session)[:2]
    bad = replace(good[0], sample_id="broken", pixels=np.zeros((4, 4), np.float32))
    sent = good if session.full_batch > 2 else good[:1]
    alone = await session.gradients(sent)
    answer = await session.gradients([sent[0], bad, *sent[1:]])
    require("broken" in answer, "the broken sample is missing in the answer")
    outcome = answer["broken"].WhichOneof("outcome")
    require(outcome == "error" and answer["broken"].error, f"pixels of shape (4, 4) got a {outcome or 'nothing'}")
    for sample in sent:
        mixed, expected = _read(answer, sample), _read(alone, sample)
        require(
            alike(mixed.score, expected.score, 0.05),
            f"{sample.sample_id} another score next to a broken one",
        )
    return answer["broken"].error


@check("large pictures", f"pictures of {LARGE_SIDE} x {LARGE_SIDE} are taken, in calls of gradient_bytes", "gradients")
async def large(session: Session) -> str | None:
    _need(session)
    rng = np.random.default_rng(0)
    coarse = rng.uniform(_MARGIN, 1 - _MARGIN, (3, 32, 32)).astype(np.float32)
    pixels = coarse.repeat(LARGE_SIDE // 32, axis=1).repeat(LARGE_SIDE // 32, axis=2)
    samples = [PixelInput(pixels, session.options.prompt, dict(session.options.metadata), f"large/{n}") for n in (0, 1)]
    await _asked(session, samples)
    return f"{pixels.nbytes / 1e6:.1f} MB each"


async def _compare(session: Session, sample: PixelInput, scored: _Gradient, part: Pixels, name: str) -> str:
    """Raises Fault unless the score rises along `part` as the gradient says, at the best of the steps."""
    direction = part / np.abs(part).max()
    expected = float((scored.gradient.astype(np.float64) * direction).sum())
    ups, downs = (
        [
            replace(sample, sample_id=f"{name}/{n}", pixels=sample.pixels + np.float32(sign * step) * direction)
            for n, step in enumerate(STEPS)
        ]
        for name, sign in (("up", 1), ("down", -1))
    )
    answer = await session.gradients([*ups, *downs])
    rises = [
        (_read(answer, up).score - _read(answer, down).score) / (2 * step)
        for step, up, down in zip(STEPS, ups, downs, strict=True)
    ]
    best = min(rises, key=lambda rise: abs(rise - expected))
    if abs(best - expected) > TOLERANCE * abs(expected):
        raise Fault(
            f"{name}: the gradient promises a rise of {expected:.4g} per unit, the score of {sample.sample_id!r} rises "
            f"by {best:.4g} at best, over changes of {STEPS[0]} to {STEPS[-1]} a pixel"
        )
    return f"{name}: {best:.4g} of {expected:.4g} per unit"


def _masks(gradient: Pixels) -> Iterable[tuple[str, Pixels]]:
    """Yields the mask of all pixels, and that of the half with the shorter gradient unless it is almost zero there."""
    everywhere = np.ones_like(gradient)
    yield "all pixels", everywhere
    left = everywhere.copy()
    left[:, :, gradient.shape[2] // 2 :] = 0
    halves = sorted((left, everywhere - left), key=lambda mask: float(np.linalg.norm(gradient * mask)))
    if float(np.linalg.norm(gradient * halves[0])) > 0.01 * float(np.linalg.norm(gradient)):
        yield "half of the picture", halves[0]


async def _asked(session: Session, samples: list[PixelInput]) -> list[_Gradient]:
    answer = await session.gradients(samples)
    return [_read(answer, sample) for sample in samples]


def _read(answer: dict[str, PixelScore], sample: PixelInput) -> _Gradient:
    """Raises Fault unless a sample has a finite score and gradient."""
    require(sample.sample_id in answer, f"sample {sample.sample_id!r} is missing in the answer")
    score = answer[sample.sample_id]
    kind = score.WhichOneof("outcome")
    require(kind == "score", f"{sample.sample_id!r}: {f'error {score.error!r}' if kind else 'neither score nor error'}")
    require(math.isfinite(score.score), f"{sample.sample_id!r}: the score is {score.score}")
    try:
        return _Gradient(score.score, read_gradient(score.gradient, sample.pixels.shape))
    except ValueError as error:
        raise Fault(f"{sample.sample_id!r}: {error}") from None


def _need(session: Session) -> None:
    if not session.described.gives_gradient:
        raise Skip("gives_gradient is not set")


def _pictures(session: Session) -> list[PixelInput]:
    """Pictures of the suite, between 0.1 and 0.9, with noise between their levels."""
    options, made = session.options, []
    for index in range(PICTURES):
        pixels = _MARGIN + (1 - 2 * _MARGIN) * _decoded(session, index)
        pixels = pixels + np.random.default_rng(index).normal(0, 0.01, pixels.shape)
        pixels = np.clip(pixels, _MARGIN / 2, 1 - _MARGIN / 2).astype(np.float32)
        made.append(PixelInput(pixels, options.prompt, dict(options.metadata), f"gradient/{index}"))
    return made


def _decoded(session: Session, index: int) -> Pixels:
    """(3, height, width) from 0 to 1."""
    frame = decode_media(*session.media(index))[0]
    pixels: Pixels = frame.transpose(2, 0, 1).astype(np.float32) / np.float32(255)
    return pixels
