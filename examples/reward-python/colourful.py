"""How colourful a picture is: Hasler and Süsstrunk, "Measuring colourfulness in natural images" (2003)."""

import sys

import numpy as np

from flowfleet.rewards import Sample, serve


def colourful(sample: Sample) -> tuple[float, dict[str, float]]:
    """Rewards color, from 0 for gray to some 110 for what the authors call extremely colourful."""
    red, green, blue = np.moveaxis(sample.frames[0].astype(np.float32), -1, 0)
    opponents = np.stack([red - green, (red + green) / 2 - blue])
    spread = float(np.linalg.norm(opponents.std(axis=(1, 2))))
    mean = float(np.linalg.norm(opponents.mean(axis=(1, 2))))
    return spread + 0.3 * mean, {"spread": spread, "mean": mean}


if __name__ == "__main__":
    parts = ("spread", "mean")
    sys.exit(serve(colourful, name="colourful", version="1", score_range=(0.0, 400.0), components=parts))
