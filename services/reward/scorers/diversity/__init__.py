"""`diversity`: how unlike the others of its group a picture is, 0 … 2. It needs no model and compares layout and color.

    score = min over j ≠ i of 1 − e_i · e_j / (|e_i| |e_j|)

e is the picture as means of 8 × 8 blocks, minus 0.5, of each channel in 0 … 1. That is GARDO's diversity (He et al.,
arXiv 2512.24138, equation 8) on plain pixels: `feature_diversity` takes the features of a vision model, as the paper
does. A sample alone in its group scores 0. Of a video e is the vectors of at most 8 evenly spaced frames, one after the
other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_VIDEO
from services.reward.scorer import Outcome, PlainScorer, Sample, Score

BLOCKS = 8
RANGE = (0.0, 2.0)
COMPONENTS = ("mean_distance",)


class Diversity(PlainScorer):
    """Component: `mean_distance` to all others of the group, of which the group's mean is its diversity."""

    name = "diversity"
    version = "1"
    modalities = (MODALITY_IMAGE, MODALITY_VIDEO)
    score_range = RANGE
    components = COMPONENTS
    needs_group = True

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        features = [np.concatenate([_blocks(picture) for picture in sample.pictures()]) for sample in samples]
        return group_scores(features, [sample.group_id for sample in samples])


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> Diversity:
    return Diversity()


def group_scores(features: Sequence[NDArray[np.floating[Any]]], groups: Sequence[str]) -> list[Outcome]:
    """The score of each sample by the features (D,) of its group's."""
    scores: dict[int, Outcome] = {}
    for group in dict.fromkeys(groups):
        rows = [row for row, other in enumerate(groups) if other == group]
        others = distances([features[row] for row in rows])
        nearest, mean = (values.tolist() for values in (others.min(axis=1), others.mean(axis=1)))
        scores |= {row: Score(nearest[n], {"mean_distance": mean[n]}) for n, row in enumerate(rows)}
    return [scores[row] for row in range(len(groups))]


def distances(features: Sequence[NDArray[np.floating[Any]]]) -> NDArray[np.float64]:
    """(N, N - 1) the cosine distances of each vector to all others; (1, 1) 0 of a single vector. A vector of length 0
    has the distance 1 to every other."""
    if len(features) < 2:
        return np.zeros((len(features), 1))
    rows = np.stack(features).astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    units = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    found = 1.0 - np.clip(units @ units.T, -1.0, 1.0)
    others: NDArray[np.float64] = found[~np.eye(len(rows), dtype=bool)].reshape(len(rows), -1)
    return others


def _blocks(picture: Image.Image) -> NDArray[np.float64]:
    small = picture.convert("RGB").resize((BLOCKS, BLOCKS), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64).ravel() / 255 - 0.5
