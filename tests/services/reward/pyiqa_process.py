"""Scores by the scorer `pyiqa` and by the library, as JSON: run where the library is (tests/packages).

torchvision's wheel is for CUDA on most indexes, and its operators are missing with a torch for CPUs. None of these
metrics calls one, so they are declared here.
"""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from services.reward.scorer import Sample, Score, Scorer
from services.reward.scorers import make

CNNIQA = "CNNIQA_koniq10k-e6f14c91.pth"


class Harm:
    """Makes a folder where it is unpickled by what runs code."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def declare_operators() -> None:
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


def ours(metric: str, images: list[Image.Image], **settings: str) -> dict[str, Any]:
    scorer = make("pyiqa", {"metric": metric, "device": "cpu", **settings}, 1)
    assert isinstance(scorer, Scorer)
    scorer.start()
    outcomes = scorer.score([Sample.of_picture(image, "") for image in images], None)
    assert all(isinstance(one, Score) for one in outcomes), outcomes
    scores = [one for one in outcomes if isinstance(one, Score)]
    return {
        "version": scorer.version,
        "scores": [one.value for one in scores],
        "metric": [one.components["metric"] for one in scores],
    }


def theirs(metric: Any, images: list[Image.Image], folder: Path) -> list[float]:
    """Calls the metric as its documentation shows, a file a call."""
    values = []
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png")
        values.append(float(metric(str(folder / f"{number}.png"))))
    return values


def refusal(metric: str, **settings: str) -> str:
    try:
        ours(metric, pictures(), **settings)
    except ValueError as error:
        return str(error)
    return ""


def main(folder: Path) -> dict[str, Any]:
    declare_operators()
    import pyiqa
    from pyiqa.archs.cnniqa_arch import CNNIQA as Network

    images = pictures()
    told: dict[str, Any] = {}
    for name in ("piqe", "entropy"):
        told[name] = {**ours(name, images), "library": theirs(pyiqa.create_metric(name, device="cpu"), images, folder)}
    told["missing"] = refusal("cnniqa", weights=str(folder))
    (folder / "pyiqa").mkdir(exist_ok=True)
    torch.save({"params": {"x": Harm(folder / "harmed")}}, folder / "pyiqa" / CNNIQA)
    told["pickle"], told["harmed"] = refusal("cnniqa", weights=str(folder)), (folder / "harmed").exists()
    torch.manual_seed(0)
    network = Network(pretrained=None)
    torch.save({"params": network.state_dict()}, folder / "pyiqa" / CNNIQA)
    metric = pyiqa.create_metric("cnniqa", device="cpu", pretrained_model_path=str(folder / "pyiqa" / CNNIQA))
    told["cnniqa"] = {**ours("cnniqa", images, weights=str(folder)), "library": theirs(metric, images, folder)}
    told["unknown"] = refusal("ssim")
    return told


if __name__ == "__main__":
    print("\n" + json.dumps(main(Path(sys.argv[1]))))
