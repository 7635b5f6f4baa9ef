"""The scorers by name. A module is imported only when its scorer is made, so that no service loads another's engine."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

from services.reward.scorer import AnyScorer

SCORERS: Final[Mapping[str, str]] = {
    "ocr": "ocr",
    "jpeg_compressibility": "jpeg",
    "jpeg_incompressibility": "jpeg",
    "motion": "motion",
    "image_quality": "image_quality",
    "diversity": "diversity",
    "http": "http",
    "python": "python",
    "human": "human",
    "clip": "clip",
    "pickscore": "clip",
    "hps": "clip",
    "aesthetic": "aesthetic",
    "feature_diversity": "feature_diversity",
    "geneval": "geneval",
    "pyiqa": "pyiqa",
    "image_reward": "image_reward",
    "hpsv3": "hpsv3",
    "exact_match": "exact_match",
    "multiple_choice": "multiple_choice",
    "math": "math",
    "vlm": "vlm",
    "local_vlm": "local_vlm",
    "vlm_ocr": "vlm_ocr",
}
"""Name to module of this package, which has `make(name, settings, num_threads)`."""


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> AnyScorer:
    """The scorer called `name`, which may use `num_threads` CPU threads. ValueError for an unknown name and for
    settings that it cannot take, naming the setting."""
    if name not in SCORERS:
        raise ValueError(f"no scorer is called {name!r}: take one of {', '.join(SCORERS)}")
    module = importlib.import_module(f"{__name__}.{SCORERS[name]}")
    scorer: AnyScorer = module.make(name, settings, num_threads)
    return scorer
