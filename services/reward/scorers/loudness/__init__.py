"""`loudness`: is the sound as loud as its prompt's line says?

With the samples x of one channel, from -1 to 1, the level is L = 20 log10(sqrt(mean x²)) in dB below full scale, at
least -100, and score = max(0, 1 - |L - target| / reach). The target is `loudness` in the metadata of the prompt's line,
such as "-20"; without it `params.loudness`. `params.reach` (default 20 dB) is the distance that scores 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowfleet.proto.reward_pb2 import MODALITY_SOUND
from services.reward.scorer import Outcome, Problem, Sample, Score, Scorer, number, read_params

SILENCE_DB = -100.0


@dataclass(frozen=True)
class LoudnessParams:
    """The parameters of a request, all optional."""

    loudness: float | None = None
    """Wanted level in dB, at most 0, of prompts whose line says none."""
    reach: float = 20.0
    """Distance in dB that scores 0."""


class LoudnessScorer(Scorer[LoudnessParams]):
    """Component: `level`, in dB."""

    name = "loudness"
    version = "1"
    modalities = (MODALITY_SOUND,)
    score_range = (0.0, 1.0)
    components = ("level",)

    def parse(self, params: Mapping[str, str]) -> LoudnessParams:
        level = number(float, lambda it: SILENCE_DB <= it <= 0, "say a level from -100 to 0 dB")
        reach = number(float, lambda it: 0 < it < math.inf, "say a number of dB above 0")
        return LoudnessParams(**read_params(params, {"loudness": level, "reach": reach}))

    def score(self, samples: Sequence[Sample], params: LoudnessParams) -> list[Outcome]:
        return [_judge(sample, params) for sample in samples]


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> LoudnessScorer:
    return LoudnessScorer()


def level_of(sound: NDArray[np.float32]) -> float:
    """Level in dB below full scale."""
    power = float(np.mean(np.square(sound, dtype=np.float64))) if len(sound) else 0.0
    return max(SILENCE_DB, 10 * math.log10(power)) if power > 0 else SILENCE_DB


def _judge(sample: Sample, params: LoudnessParams) -> Outcome:
    said = sample.metadata.get("loudness", params.loudness)
    try:
        target = float("nan" if said is None else said)
    except ValueError:
        target = math.nan
    if not SILENCE_DB <= target <= 0:
        return Problem("metadata", f"loudness = {said!r}: give a level from -100 to 0 dB in the prompt's line")
    level = level_of(sample.sound)
    return Score(max(0.0, 1 - abs(level - target) / params.reach), {"level": level})
