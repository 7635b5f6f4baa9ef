"""The scorers around models as services, on tiny random checkpoints, before the conformance suite."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from flowfleet import conformance
from recipes.tiny_vlm.model import make_tiny_vlm
from recipes.tiny_vlm.teach import RUBRIC
from tests.services.reward.conftest import reward_process
from tests.tiny_models.clip import save_clip
from tests.tiny_models.detectors import save_owlvit

ASKED = {"geneval": json.dumps({"tag": "colors", "include": [{"class": "sign", "count": 1, "color": "red"}]})}


def _clip(folder: Path) -> dict[str, object]:
    return {"model": str(save_clip(folder / "model"))}


def _aesthetic(folder: Path) -> dict[str, object]:
    layer = {"layers.0.weight": np.ones((1, 16), np.float32), "layers.0.bias": np.ones(1, np.float32)}
    save_file(layer, folder / "head.safetensors")
    return _clip(folder) | {"head": str(folder / "head.safetensors")}


def _local_vlm(folder: Path) -> dict[str, object]:
    return {"model": str(make_tiny_vlm(folder / "vlm")), "rubric": str(RUBRIC)}


def _geneval(folder: Path) -> dict[str, object]:
    detector = save_owlvit(folder / "detector")
    return {"model": str(detector), "clip": str(save_clip(folder / "model")), "threshold": 0.1}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "settings", "metadata"),
    [
        ("clip", _clip, {}),
        ("pickscore", _clip, {}),
        ("hps", _clip, {}),
        ("aesthetic", _aesthetic, {}),
        ("local_vlm", _local_vlm, {}),
        ("geneval", _geneval, ASKED),
    ],
    ids=["clip", "pickscore", "hps", "aesthetic", "local_vlm", "geneval"],
)
def test_they_keep_the_contract(
    name: str, settings: Callable[[Path], dict[str, object]], metadata: Mapping[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(settings(tmp_path) | {"device": "cpu"}))
    flags = ("--scorer", name, "--settings", str(file), "--processes", "1", "--threads", "1")
    with reward_process(tmp_path, *flags) as service:
        report = conformance.run(
            f"grpc://{service.address}", conformance.Options(metadata=metadata, connect_s=60.0, allowed_s=30.0)
        )
    assert report.ok, report.text()
