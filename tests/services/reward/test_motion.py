from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.media.files import Frames, decode_media, encode_media
from services.reward.scorer import Outcome, Problem, Sample, Score
from services.reward.scorers.motion import CONTRAST, FULL_AREA, MotionParams, MotionScorer, direction_of

RED, GROUND = (220, 60, 55), (30, 32, 40)


def square(
    way: tuple[float, float],
    *,
    num_frames: int = 9,
    height: int = 40,
    width: int = 64,
    side: int = 8,
    color: tuple[int, int, int] = RED,
) -> Frames:
    """A square whose center goes `way` (x, y pixels, even motion, rounded to whole pixels) through the middle."""
    frames = np.full((num_frames, height, width, 3), GROUND, np.uint8)
    for t, frame in enumerate(frames):
        share = t / max(1, num_frames - 1) - 0.5
        left, top = (round(size / 2 + share * part - side / 2) for size, part in ((width, way[0]), (height, way[1])))
        frame[top : top + side, left : left + side] = color
    return frames


def oracle(frames: Frames, direction: tuple[int, int], reach: float) -> tuple[float, float, float, float]:
    """The docstring's formula, pixel by pixel in Python's floats: score, dx, dy, presence."""
    num_frames, height, width, _ = frames.shape
    rows, columns = range(height), range(width)
    rim = [(i, j) for i in rows for j in columns if i in (0, height - 1) or j in (0, width - 1)]
    corners = [(i, j) for i in (0, height - 1) for j in (0, width - 1)]  # on two sides each
    ground = [
        float(np.median([frames[t, i, j, c] / 255 for t in range(num_frames) for i, j in rim + corners]))
        for c in range(3)
    ]
    points = []
    for t in range(num_frames):
        mass = x = y = 0.0
        for i in rows:
            for j in columns:
                d = max(abs(float(frames[t, i, j, c]) / 255 - ground[c]) for c in range(3))
                w = min(max(d / 0.15 - 1, 0.0), 1.0)
                mass, x, y = mass + w, x + w * (j + 0.5) / width, y + w * (i + 0.5) / height
        presence = min(1.0, mass / (height * width) / 0.005)
        points.append((x / mass, y / mass, presence) if mass else (0.0, 0.0, 0.0))
    times = [t / max(1, num_frames - 1) for t in range(num_frames)]
    weights = [point[2] for point in points]
    dx = dy = 0.0
    if sum(weight > 0 for weight in weights) > 1:
        fits = [np.polyfit(times, [point[k] for point in points], 1, w=np.sqrt(weights)) for k in (0, 1)]
        dx, dy = (float(fit[0]) for fit in fits)
    along = dx * direction[0] + dy * direction[1]
    across = abs(dx) if direction[0] == 0 else abs(dy)
    share = sum(weights) / num_frames
    return share * min(max((along - across) / reach, 0.0), 1.0), dx, dy, share


def judged(frames: Frames, prompt: str, reach: float = 0.5) -> Outcome:
    (outcome,) = MotionScorer().score([Sample(frames, prompt)], MotionParams(reach))
    return outcome


def score(frames: Frames, prompt: str, reach: float = 0.5) -> Score:
    outcome = judged(frames, prompt, reach)
    assert isinstance(outcome, Score)
    return outcome


@pytest.mark.parametrize(
    ("prompt", "way"),
    [
        ("A red ball moving left", (-16, 0)),
        ("a ball that goes to the RIGHT, slowly", (16, 0)),
        ("upward it flies", (0, -10)),
        ("Down!", (0, 10)),
        ("it drifts rightwards", (16, 0)),
    ],
)
def test_a_quarter_of_the_frame_along_the_direction_is_half_the_reach(prompt: str, way: tuple[int, int]) -> None:
    found = score(square(way), prompt)
    dx, dy = way[0] / 64, way[1] / 40  # a quarter of the frame; the least-squares line goes through every frame
    assert found.components["dx"] == pytest.approx(dx, abs=0.01)
    assert found.components["dy"] == pytest.approx(dy, abs=0.01)
    assert found.components["presence"] == 1.0
    assert found.value == pytest.approx(0.5, abs=0.03)
    assert score(square((-way[0], -way[1])), prompt).value == 0.0
    assert score(square((way[1], way[0])), prompt).value == 0.0
    assert score(square(way), prompt, reach=0.2).value == 1.0


def test_drifting_diagonally_serves_no_direction() -> None:
    frames = square((32, 20))
    assert all(score(frames, f"moving {word}").value < 0.02 for word in ("left", "right", "up", "down"))


def test_nothing_to_see_scores_zero() -> None:
    for frames in (
        square((0, 0), color=GROUND),
        square((16, 0), color=(35, 36, 46)),
        np.zeros((5, 8, 8, 3), np.uint8),
    ):
        assert score(frames, "right") == Score(0.0, {"dx": 0.0, "dy": 0.0, "presence": 0.0})


def test_a_subject_that_fades_earns_less() -> None:
    frames, full = square((16, 0)), score(square((16, 0)), "right").value
    frames[5:] = GROUND
    half = score(frames, "right")
    assert half.components["presence"] == pytest.approx(5 / 9)
    assert half.value == pytest.approx(full * 5 / 9, abs=0.02)
    frames[1:] = GROUND
    assert score(frames, "right").value == 0.0


def test_specks_count_by_their_area() -> None:
    frames = square((16, 0), side=2)
    found = score(frames, "right")
    assert found.components["presence"] == pytest.approx(4 / (40 * 64) / FULL_AREA)


def test_contrast_sets_in_gradually() -> None:
    gray = round(255 * 1.5 * CONTRAST)
    frames = np.zeros((3, 40, 64, 3), np.uint8)
    frames[:, 10:12, 10:12] = gray
    weight = gray / 255 / CONTRAST - 1
    assert score(frames, "left").components["presence"] == pytest.approx(4 * weight / (40 * 64) / FULL_AREA)


def test_one_frame_does_not_move() -> None:
    assert score(square((0, 0), num_frames=1), "left") == Score(0.0, {"dx": 0.0, "dy": 0.0, "presence": 1.0})


def test_compression_hardly_matters() -> None:
    frames = square((-16, 0))
    decoded = decode_media(*encode_media(frames))
    assert score(decoded, "left").value == pytest.approx(score(frames, "left").value, abs=0.01)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.sampled_from(["left", "right", "up", "down"]))
def test_random_videos_score_by_the_formula(seed: int, num_frames: int, word: str) -> None:
    rng = np.random.default_rng(seed)
    frames = np.full((num_frames, 7, 9, 3), rng.integers(0, 256, 3), np.uint8)
    for frame in frames:
        height, width = rng.integers(0, 6, 2)
        top, left = rng.integers(0, 4, 2)
        frame[top : top + height, left : left + width] = rng.integers(0, 256, (3,))
    frames = np.clip(frames + rng.normal(0, 6, frames.shape), 0, 255).astype(np.uint8)
    found = score(frames, word, 0.3)
    expected = oracle(frames, direction_of(word), 0.3)
    actual = (found.value, *(found.components[name] for name in ("dx", "dy", "presence")))
    np.testing.assert_allclose(actual, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("A red ball", "names no direction: say one of left, right, up, down"),
        ("An uptown cleft", "names no direction"),
        ("left and then up", r"several directions \(left, up\): say one"),
    ],
)
def test_prompts_without_one_direction_are_problems_of_their_sample(prompt: str, message: str) -> None:
    outcomes = MotionScorer().score([Sample(square((8, 0)), prompt), Sample(square((8, 0)), "right")], MotionParams())
    assert isinstance(outcomes[0], Problem)
    assert outcomes[0].reason == "prompt"
    with pytest.raises(ValueError, match=message):
        direction_of(prompt)
    assert isinstance(outcomes[1], Score)


def test_the_same_word_twice_is_one_direction() -> None:
    assert direction_of("left, further left, leftward") == (-1, 0)


def test_parameters() -> None:
    scorer = MotionScorer()
    assert scorer.parse({}) == MotionParams(0.5)
    assert scorer.parse({"reach": "0.25"}) == MotionParams(0.25)
    for bad in ("0", "-1", "1.5", "nan", "far"):
        with pytest.raises(ValueError, match=r"params\.reach"):
            scorer.parse({"reach": bad})
    with pytest.raises(ValueError, match=r"params\.speed is unknown"):
        scorer.parse({"speed": "1"})
