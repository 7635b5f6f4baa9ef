"""The scorers by name. A module is imported only when its scorer is made, so that no service loads another's engine."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

from services.reward.scorer import AnyScorer

SCORERS: Final[Mapping[str, str]] = {
    "ocr": "reading.ocr",
    "jpeg_compressibility": "jpeg",
    "jpeg_incompressibility": "jpeg",
    "motion": "motion",
    "image_quality": "image_quality",
    "diversity": "diversity",
    "http": "http_scorer",
    "python": "python_function",
    "human": "human",
    "clip": "networks.clip_models",
    "pickscore": "networks.clip_models",
    "hps": "networks.clip_models",
    "aesthetic": "networks.aesthetic",
    "feature_diversity": "networks.feature_diversity",
    "geneval": "networks.geneval",
    "pyiqa": "networks.pyiqa_metrics",
    "image_reward": "networks.image_reward_model",
    "hpsv3": "networks.hpsv3_model",
    "exact_match": "answers.exact_match",
    "multiple_choice": "answers.multiple_choice",
    "math": "answers.math_answers",
    "vlm": "vlm",
    "local_vlm": "differentiable.local_judge",
    "vlm_ocr": "reading.vlm_ocr",
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
