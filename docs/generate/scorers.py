"""The tables of settings in docs/scorers.md and docs/rewards.md, from the classes that read them.

`python -m docs.generate.scorers` rewrites them, in the directory of the repository.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from docs.generate.fields import rows
from docs.generate.markdown import rewrite, table
from flowfleet.rewards.service import Reward
from services.reward import scorers
from services.reward.judge.rubrics import Rubric
from services.reward.scorer import NoSettings, ScorerSettings

PAGE: Final = Path("docs/scorers.md")
REWARDS: Final = Path("docs/rewards.md")

SETTINGS: Final = {
    "ModelSettings": ("clip", "pickscore", "hps", "aesthetic", "feature_diversity", "geneval", "local_vlm"),
    "ClipSettings": ("clip",),
    "PickScoreSettings": ("pickscore",),
    "HpsSettings": ("hps",),
    "AestheticSettings": ("aesthetic",),
    "GenevalSettings": ("geneval",),
    "PyiqaSettings": ("pyiqa",),
    "ImageRewardSettings": ("image_reward",),
    "HPSv3Settings": ("hpsv3",),
    "MathSettings": ("math",),
    "HumanSettings": ("human",),
    "HttpSettings": ("http",),
    "PythonSettings": ("python",),
    "JudgeSettings": ("vlm", "vlm_ocr"),
    "VlmSettings": ("vlm",),
    "VlmOcrSettings": ("vlm_ocr",),
    "LocalVlmSettings": ("local_vlm",),
}
"""Class of settings → scorers that read them, in the order of the page."""

PARAMS: Final = {
    ("ocr", "OcrParams"): ("ocr",),
    ("motion", "MotionParams"): ("motion",),
    ("exact_match", "AnswerParams"): ("exact_match", "multiple_choice", "math"),
    ("human", "HumanParams"): ("human",),
}
"""Module and class of a job's `params` → scorers that take them."""


def parts() -> dict[str, str]:
    """Name to content of each generated part of the page of scorers. ValueError for settings whose scorers SETTINGS
    does not name."""
    for module in dict.fromkeys(scorers.SCORERS.values()):
        importlib.import_module(f"{scorers.__name__}.{module}")
    known = {one.__name__: one for one in _subclasses(ScorerSettings) if one is not NoSettings}
    if wrong := known.keys() ^ SETTINGS.keys():
        raise ValueError(f"SETTINGS must name the scorers of each class of settings: {', '.join(sorted(wrong))}")
    params = {
        names: getattr(importlib.import_module(f"{scorers.__name__}.{module}"), name)
        for (module, name), names in PARAMS.items()
    }
    return {
        "params": _tables("param", params.items()),
        "rubric": table(["key", "default", "meaning"], rows(Rubric)),
        "settings": _tables("setting", ((names, known[name]) for name, names in SETTINGS.items())),
    }


def reward_parts() -> dict[str, str]:
    """Name to content of each generated part of the page of rewards that this module writes."""
    return {"serve": table(["argument of `serve`", "default", "meaning"], rows(Reward))}


def _subclasses(owner: type[ScorerSettings]) -> Iterator[type[ScorerSettings]]:
    for one in owner.__subclasses__():
        if one.__module__.startswith("services."):
            yield one
        yield from _subclasses(one)


def _tables(what: str, owners: Iterable[tuple[tuple[str, ...], type]]) -> str:
    """A table for each class, below the names of its scorers."""
    return "\n\n".join(
        ", ".join(f"`{name}`" for name in names) + ":\n\n" + table([what, "default", "meaning"], rows(owner))
        for names, owner in owners
    )


if __name__ == "__main__":
    rewrite(PAGE, parts())
    rewrite(REWARDS, reward_parts())
