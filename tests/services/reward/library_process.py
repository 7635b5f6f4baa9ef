"""Runs a module of this folder where the library of a scorer is (tests/packages), and reads what it tells as JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from services.reward.scorer import Sample, Score, Scorer
from services.reward.scorers import make

ROOT = Path(__file__).parents[3]
LIBRARIES = Path(os.environ.get("FLOWFLEET_SCORERS", ROOT / ".venv-scorers"))


class Harm:
    """Makes a folder where it is unpickled by what runs code."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def told_by(scorer: str, folder: Path) -> dict[str, Any]:
    """What `main(folder)` of tests/services/reward/SCORER_process.py returns there."""
    library = LIBRARIES / scorer
    if not library.is_dir():
        pytest.skip(f"needs the library of {scorer} in {library}: run tests/packages")
    command = [sys.executable, "-m", f"tests.services.reward.{scorer}_process", str(folder)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{library}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def declare_operators() -> None:
    """torchvision's wheel is for CUDA on most indexes, and its operators are missing with a torch for CPUs. No scorer
    calls one, so they are declared here."""
    import torch

    found = find_spec("torchvision")
    assert found is not None
    assert found.origin is not None
    text = Path(found.origin).with_name("_meta_registrations.py").read_text()
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in {one or other for one, other in re.findall(r'"torchvision::(\w+)"|register_meta\("(\w+)"', text)}:
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor x) -> Tensor")
    globals()["kept"] = library


def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    small = [rng.integers(0, 256, (8, 8, 3), dtype=np.uint8) for _ in range(3)]
    sizes = ((128, 128), (96, 160), (128, 128))
    smooth = [
        Image.fromarray(one).resize(size, Image.Resampling.BICUBIC) for one, size in zip(small, sizes, strict=True)
    ]
    return [_noisy(image, amount, rng) for amount, image in zip((2, 8, 20), smooth, strict=True)]


def _noisy(image: Image.Image, amount: int, rng: np.random.Generator) -> Image.Image:
    pixels = np.asarray(image).astype(int)
    pixels += rng.integers(-amount, amount + 1, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def started(scorer: str, **settings: Any) -> Scorer[Any]:
    made = make(scorer, {"device": "cpu", **settings}, 1)
    assert isinstance(made, Scorer)
    made.start()
    return made


def scores(scorer: Scorer[Any], samples: list[Sample]) -> list[Score]:
    outcomes = scorer.score(samples, None)
    assert all(isinstance(one, Score) for one in outcomes), outcomes
    return [one for one in outcomes if isinstance(one, Score)]


def refusal(scorer: str, **settings: Any) -> str:
    try:
        started(scorer, **settings)
    except ValueError as error:
        return str(error)
    return ""
