"""Losses that train on the gradient of a reward by the pixels of a clean image that one velocity predicts.

A loss says at which noisy latents the velocity is taken (`start`), which clean latents follow from it (`image`), and
what the reward of the decoded image counts (`wishes`). The trainer decodes, asks the reward for its gradient, and takes
-(gradient of the wishes by the clean latents) x (clean latents), whose gradient by the weights is that of minus the
reward. Jobs find losses by name in `flowfleet.algorithms.registry`. With noise e, a level s and clean latents x0,
x_s = (1 - s) x0 + s e, and the right velocity is e - x0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowfleet.algorithms.builtin.followed import ReflSettings, SrpoSettings
from flowfleet.algorithms.matching.losses import per_row


@dataclass(frozen=True, slots=True)
class GradientRows:
    """Inputs of a loss: B rows."""

    latents: Tensor
    """(B, ...) float32, at `sigma`: what the velocity was taken at."""
    sigma: Tensor
    """(B,) in (0, 1]."""
    velocity: Tensor
    """(B, ...) of the current policy there, with gradient."""
    noise: Tensor | None = None
    """(B, ...) that was injected into clean latents; None where the latents were sampled."""
    after: Tensor | None = None
    """(B,) below `sigma`: the level that a loss with `align_step` recovers an image at; None for other losses."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A reward of an image that counts."""

    factors: Tensor
    """(B,) of the reward's gradient; above 0 wants more of it."""
    words: str = ""
    """Control words, before the prompt that the reward is asked with."""
    ceiling: float | None = None
    """A reward of at least this counts for nothing."""


@dataclass(frozen=True, slots=True)
class GradientOutput:
    image: Tensor
    """(B, ...) predicted clean latents, with gradient."""
    wishes: tuple[Wish, ...]


GradientLoss = Callable[[GradientRows, Any, int], GradientOutput]
"""(rows, algorithm, training step)."""


def refl(rows: GradientRows, part: ReflSettings, step: int) -> GradientOutput:
    """ReFL, https://arxiv.org/abs/2304.05977, algorithm 1: x0 as predicted from a late step's latents, x_s - s v, which
    steps without gradient led to.

    loss = phi(r(x0)) with phi(r) = -r, or max(0, c - r) with c = `reward_ceiling`, which is 2 in the authors' code.
    """
    del step
    image = rows.latents - per_row(rows.sigma, rows.latents) * rows.velocity.to(rows.latents)
    return GradientOutput(image, (Wish(torch.ones_like(rows.sigma), ceiling=part.reward_ceiling),))


def srpo(rows: GradientRows, part: SrpoSettings, step: int) -> GradientOutput:
    """SRPO, https://arxiv.org/abs/2509.06942, sections 3.1 and 3.2, as its authors' code for Qwen-Image has it.

    Direct alignment: known noise e leads from clean latents to x_s; one step of the policy leads on to s' < s, and the
    known noise back to a clean image, ((x_s + (s' - s) v) - s' e) / (1 - s'). Of it the policy made the share
    (s - s') / (1 - s'), so that it is an image even where s is near 1. s' is drawn, and s comes of it: `aligned`.

    Semantic relative preference: the reward of the prompt with a positive control word, (1 + k) times, less the reward
    of the prompt with a negative one; k = `relative_weight`. Steps take the words in turn. Without words it is the
    reward of the prompt itself. Each row counts as d s' / (1 + (d - 1) s') with d = `discount_shift`: low noise levels,
    at which rewards are hacked most easily, for little.
    """
    assert rows.noise is not None
    assert rows.after is not None
    after = rows.after
    s, s_next = per_row(rows.sigma, rows.latents), per_row(after, rows.latents)
    moved = rows.latents + (s_next - s) * rows.velocity.to(rows.latents)
    image = (moved - s_next * rows.noise.to(rows.latents)) / (1 - s_next)
    shift = part.discount_shift
    discount = shift * after / (1 + (shift - 1) * after)
    positive, negative = word_of(part.positive_words, step), word_of(part.negative_words, step)
    wishes = [Wish(discount * (1 + part.relative_weight) if negative else discount, positive)]
    if negative:
        wishes.append(Wish(-discount, negative))
    return GradientOutput(image, tuple(wishes))


def aligned(drawn: Tensor, align_step: float, high: float) -> tuple[Tensor, Tensor]:
    """(B,) each: s, where SRPO's step begins, and s', where it ends. s' is `drawn` (B,) and s = min(s' + `align_step`,
    `high`), the greatest level. At s' = 1, from which no image is recovered, s = 1 and s' is a step below, or half."""
    below = drawn - torch.minimum(torch.full_like(drawn, align_step), drawn / 2)
    return (drawn + align_step).clamp(max=high), torch.where(drawn < 1, drawn, below)


def word_of(words: Sequence[str], step: int) -> str:
    """The control words of a training step, each in its turn; "" where there are none."""
    return words[step % len(words)] if words else ""


def with_words(words: str, prompt: str) -> str:
    """The prompt that a reward is asked with, as SRPO's authors write it."""
    return f"{words}. {prompt}" if words else prompt
