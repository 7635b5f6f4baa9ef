"""The scorers around models as services, on tiny random checkpoints, before the conformance suite."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from flowfleet import conformance
from recipes.tiny_vlm.model import make_tiny_vlm
from recipes.tiny_vlm.teach import RUBRIC
from tests.services.reward.conftest import reward_process
from tests.services.reward.test_edits_and_sounds import Alex, save_dinov2, url
from tests.tiny_models.clip import save_clip
from tests.tiny_models.detectors import save_owlvit
from tests.tiny_models.hearing import save_clap, save_whisper

ASKED = {"geneval": json.dumps({"tag": "colors", "include": [{"class": "sign", "count": 1, "color": "red"}]})}

SOURCE = {"source": url(Image.linear_gradient("L").convert("RGB"))}


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


def _identity(folder: Path) -> dict[str, object]:
    return {"model": str(save_dinov2(folder / "model"))}


def _lpips(folder: Path) -> dict[str, object]:
    save_file({name: tensor.numpy() for name, tensor in Alex().state_dict().items()}, folder / "lpips.safetensors")
    return {"model": str(folder / "lpips.safetensors")}


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
        ("identity", _identity, SOURCE),
        ("lpips", _lpips, SOURCE),
        ("frame_consistency", _clip, {}),
        ("clap", lambda folder: {"model": str(save_clap(folder / "model"))}, {}),
        ("speech", lambda folder: {"model": str(save_whisper(folder / "model"))}, {"speech": "a red sign"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
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
