"""Scores by the scorer `pyiqa` and by the library, as JSON: run where the library is (tests/packages)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from services.reward.scorer import Sample
from tests.services.reward.library_process import Harm, declare_operators, pictures, refusal, scores, started

CNNIQA = "CNNIQA_koniq10k-e6f14c91.pth"


def ours(metric: str, images: list[Image.Image], **settings: str) -> dict[str, Any]:
    scorer = started("pyiqa", metric=metric, **settings)
    found = scores(scorer, [Sample.of_picture(image, "") for image in images])
    return {
        "version": scorer.version,
        "scores": [one.value for one in found],
        "metric": [one.components["metric"] for one in found],
    }


def theirs(metric: Any, images: list[Image.Image], folder: Path) -> list[float]:
    """Calls the metric as its documentation shows, a file a call."""
    values = []
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png")
        values.append(float(metric(str(folder / f"{number}.png"))))
    return values


def main(folder: Path) -> dict[str, Any]:
    declare_operators()
    import pyiqa
    from pyiqa.archs.cnniqa_arch import CNNIQA as Network

    images = pictures()
    told: dict[str, Any] = {}
    for name in ("piqe", "entropy"):
        told[name] = {**ours(name, images), "library": theirs(pyiqa.create_metric(name, device="cpu"), images, folder)}
    told["missing"] = refusal("pyiqa", metric="cnniqa", weights=str(folder))
    (folder / "pyiqa").mkdir(exist_ok=True)
    torch.save({"params": {"x": Harm(folder / "harmed")}}, folder / "pyiqa" / CNNIQA)
    told["pickle"] = refusal("pyiqa", metric="cnniqa", weights=str(folder))
    told["harmed"] = (folder / "harmed").exists()
    torch.manual_seed(0)
    network = Network(pretrained=None)
    torch.save({"params": network.state_dict()}, folder / "pyiqa" / CNNIQA)
    metric = pyiqa.create_metric("cnniqa", device="cpu", pretrained_model_path=str(folder / "pyiqa" / CNNIQA))
    told["cnniqa"] = {**ours("cnniqa", images, weights=str(folder)), "library": theirs(metric, images, folder)}
    told["unknown"] = refusal("pyiqa", metric="ssim")
    return told


if __name__ == "__main__":
    print("\n" + json.dumps(main(Path(sys.argv[1]))))
