"""Losses on gradients of rewards against their formulas in NumPy, float64, written in another form."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.algorithms.builtin.followed import ReflSettings, SrpoSettings
from flowfleet.algorithms.reward_gradient import GradientRows, aligned, refl, srpo, with_words

SHAPE = (3, 4, 5)


def rows(seed: int, sigma: list[float], after: list[float] | None = None) -> tuple[GradientRows, np.ndarray]:
    """Rows in float64, and the clean latents that noise was added to; with noise where a step ends at `after`."""
    random = np.random.default_rng(seed)
    clean, noise, velocity = (random.normal(size=(len(sigma), *SHAPE)) for _ in range(3))
    s = np.array(sigma).reshape(-1, 1, 1, 1)
    latents = (1 - s) * clean + s * noise
    tensors = [torch.from_numpy(array) for array in (latents, np.array(sigma), velocity, noise)]
    low = None if after is None else torch.tensor(after, dtype=torch.float64)
    noise_of = None if after is None else tensors[3]
    return GradientRows(tensors[0], tensors[1], tensors[2].requires_grad_(), noise_of, low), clean


def test_refl_predicts_the_clean_image_of_a_straight_line() -> None:
    given_rows, _ = rows(1, [0.3, 0.9])
    output = refl(given_rows, ReflSettings(reward_ceiling=2.0), 0)
    for row, sigma in enumerate((0.3, 0.9)):
        expected = given_rows.latents[row].numpy() - sigma * given_rows.velocity[row].detach().numpy()
        np.testing.assert_allclose(output.image[row].detach().numpy(), expected, rtol=1e-12)
    (wish,) = output.wishes
    assert (wish.factors.tolist(), wish.words, wish.ceiling) == ([1.0, 1.0], "", 2.0)


@given(sigma=st.floats(0.02, 0.98), after=st.floats(0.01, 0.9), shift=st.floats(0.1, 10.0), seed=st.integers(0, 99))
def test_srpo_recovers_an_image_by_the_share_that_the_policy_made(
    sigma: float, after: float, shift: float, seed: int
) -> None:
    """x0 + rho (e - x0 - v) with rho = (s - s') / (1 - s'): the known image, moved by the policy's error."""
    after *= sigma
    given_rows, clean = rows(seed, [sigma], [after])
    output = srpo(given_rows, SrpoSettings(discount_shift=shift), 0)
    rho = (sigma - after) / (1 - after)
    assert given_rows.noise is not None
    noise, velocity = given_rows.noise.numpy(), given_rows.velocity.detach().numpy()
    np.testing.assert_allclose(
        output.image.detach().numpy(), clean + rho * (noise - clean - velocity), rtol=1e-9, atol=1e-9
    )
    (slope,) = torch.autograd.grad(output.image.sum(), given_rows.velocity)
    np.testing.assert_allclose(slope.numpy(), -rho, rtol=1e-9, atol=1e-12)
    (wish,) = output.wishes
    np.testing.assert_allclose(wish.factors.numpy(), [1 / (1 + (1 / after - 1) / shift)], rtol=1e-12)


def test_a_right_velocity_leaves_the_image_as_it_was() -> None:
    given_rows, clean = rows(3, [0.5, 0.99], [0.25, 0.6])
    assert given_rows.noise is not None
    right = GradientRows(
        given_rows.latents,
        given_rows.sigma,
        given_rows.noise - torch.from_numpy(clean),
        given_rows.noise,
        given_rows.after,
    )
    np.testing.assert_allclose(srpo(right, SrpoSettings(), 0).image.numpy(), clean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("step", "positive"), [(0, "Real"), (1, "Sharp"), (2, "Real")])
def test_relative_preference_wants_the_positive_words_and_not_the_negative(step: int, positive: str) -> None:
    given_rows, _ = rows(4, [0.8, 0.2], [0.4, 0.1])
    settings = SrpoSettings(
        positive_words=("Real", "Sharp"), negative_words=("Oily",), relative_weight=0.5, discount_shift=1.0
    )
    wanted, unwanted = srpo(given_rows, settings, step).wishes
    assert (wanted.words, unwanted.words) == (positive, "Oily")
    np.testing.assert_allclose(wanted.factors.numpy(), [1.5 * 0.4, 1.5 * 0.1], rtol=1e-12)
    np.testing.assert_allclose(unwanted.factors.numpy(), [-0.4, -0.1], rtol=1e-12)


def test_words_stand_before_the_prompt() -> None:
    assert with_words("Real", "a cat") == "Real. a cat"
    assert with_words("", "a cat") == "a cat"


def test_the_drawn_level_is_where_the_step_ends_and_the_greatest_where_it_begins_at_most() -> None:
    """The authors draw levels of 0.2 to 0.9 for the image."""
    drawn = torch.tensor([0.2, 0.7, 0.9], dtype=torch.float64)
    sigma, after = aligned(drawn, 0.287, 0.9)
    np.testing.assert_allclose(sigma.numpy(), [0.487, 0.9, 0.9], rtol=1e-12)
    np.testing.assert_allclose(after.numpy(), [0.2, 0.7, 0.9], rtol=1e-12)
    assert aligned(torch.tensor([1.0]), 0.9, 1.0)[1].tolist() == [0.5]
