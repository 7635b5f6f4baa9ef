"""`motion`: does what the video shows move the way that its prompt says: left, right, up or down?

Exactly, with colors in 0 … 1, frames t = 0 … F − 1, and positions as fractions of the frame, x to the right, y down:

- ground b: the median color, channel by channel, of the outermost pixels of all frames;
- foreground of a pixel p: w_t(p) = clip(d / 0.15 − 1, 0, 1) with d = max over channels of |color − b|;
- area a_t = mean of w_t, centroid c_t = Σ w_t(p) p / Σ w_t(p), and presence p_t = min(1, a_t / 0.005), so that a
  subject of half a percent of the frame is wholly there;
- displacement (dx, dy): the slope of the least-squares line through c_t over t / (F − 1), weighted by p_t; which is the
  way from the first frame to the last for even motion, but leans on every frame; 0 with fewer than two visible frames;
- score = mean of p_t × clip((along − |across|) / reach, 0, 1), where along and across are the parts of (dx, dy) in the
  asked direction and at right angles to it, so that drifting diagonally does not serve two directions.

`params.reach` (default 0.5: half the frame) is the displacement that earns the full score. A video without anything but
its ground scores 0.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowfleet.media.files import Frames
from flowfleet.proto.reward_pb2 import MODALITY_VIDEO
from services.reward.scorer import Outcome, Problem, Sample, Score, Scorer, number, read_params

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Word to the unit vector, x to the right and y down."""
CONTRAST = 0.15
"""Distance from the ground's color at which a pixel begins to count; at twice that it counts in full."""
FULL_AREA = 0.005
"""Share of the frame from which on a subject is wholly there."""

_WORD = re.compile(rf"\b({'|'.join(DIRECTIONS)})(?:wards?)?\b", re.IGNORECASE)


@dataclass(frozen=True)
class MotionParams:
    """The parameters of a request, all optional."""

    reach: float = 0.5
    """Displacement that earns the full score, as a fraction of the frame."""


class MotionScorer(Scorer[MotionParams]):
    """Components: `dx`, `dy` (displacement from the first frame to the last as fractions of the frame) and `presence`
    (how far the subject is there, over all frames)."""

    name = "motion"
    version = "1"
    modalities = (MODALITY_VIDEO,)
    score_range = (0.0, 1.0)
    components = ("dx", "dy", "presence")

    def parse(self, params: Mapping[str, str]) -> MotionParams:
        hint = "say a fraction of the frame, above 0 and at most 1"
        return MotionParams(**read_params(params, {"reach": number(float, lambda it: 0.0 < it <= 1.0, hint)}))

    def score(self, samples: Sequence[Sample], params: MotionParams) -> list[Outcome]:
        return [_judge(sample, params) for sample in samples]


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> MotionScorer:
    return MotionScorer()


def direction_of(prompt: str) -> tuple[int, int]:
    """The unit vector of the one direction that a prompt names. ValueError for none or several."""
    words = sorted({match[1].lower() for match in _WORD.finditer(prompt)})
    if not words:
        raise ValueError(f"the prompt names no direction: say one of {', '.join(DIRECTIONS)}")
    if len(words) > 1:
        raise ValueError(f"the prompt names several directions ({', '.join(words)}): say one")
    return DIRECTIONS[words[0]]


def track(frames: Frames) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Centroids (F, 2), x and y in 0 … 1 (0 where there is nothing), and presences (F,) of the foreground."""
    ground = _ground(frames)
    height, width = frames.shape[1:3]
    x, y = (np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height
    centroids, presences = np.zeros((len(frames), 2)), np.zeros(len(frames))
    for t, frame in enumerate(frames):
        distance = np.abs(frame / 255 - ground).max(axis=-1)
        weights = np.clip(distance / CONTRAST - 1, 0, 1)
        if total := float(weights.sum()):
            centroids[t] = weights.sum(0) @ x / total, weights.sum(1) @ y / total
            presences[t] = min(1.0, total / weights.size / FULL_AREA)
    return centroids, presences


def displacement(centroids: NDArray[np.float64], presences: NDArray[np.float64]) -> tuple[float, float]:
    """(dx, dy) over the whole video by weighted least squares; (0, 0) with fewer than two visible frames."""
    if np.count_nonzero(presences) < 2:
        return 0.0, 0.0
    weights = presences / presences.sum()
    times = np.linspace(0, 1, len(presences))
    times = times - weights @ times
    dx, dy = (weights * times) @ centroids / (weights @ times**2)
    return float(dx), float(dy)


def _judge(sample: Sample, params: MotionParams) -> Outcome:
    try:
        right, down = direction_of(sample.prompt)
    except ValueError as error:
        return Problem("prompt", str(error))
    centroids, presences = track(sample.frames)
    dx, dy = displacement(centroids, presences)
    along, across = dx * right + dy * down, abs(dx * down) + abs(dy * right)
    presence = float(presences.mean())
    value = presence * min(max((along - across) / params.reach, 0.0), 1.0)
    return Score(value, {"dx": dx, "dy": dy, "presence": presence})


def _ground(frames: Frames) -> NDArray[np.float64]:
    """(3,) in 0 … 1: the median of the outermost pixels of all frames."""
    rim = [frames[:, 0], frames[:, -1], frames[:, :, 0], frames[:, :, -1]]
    ground: NDArray[np.float64] = np.median(np.concatenate([side.reshape(-1, 3) for side in rim]), axis=0) / 255
    return ground
