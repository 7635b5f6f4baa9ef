"""`flowfleet plan` of a model that is a name of the Hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from flowfleet import hub
from flowfleet.job.files import RECIPES, prepare_job
from flowfleet.planning.plan import predict
from tests.hub_models import served


def test_a_plan_needs_the_configurations_of_a_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    shutil.copytree(RECIPES / "tiny" / "model", tmp_path / "hub" / "Org" / "Tiny")
    named = prepare_job(Path("tiny_ocr"), ["model.path=Org/Tiny"], same_machine=True)
    with served(tmp_path, monkeypatch) as site:
        monkeypatch.setenv(hub.MODELS, "")
        with pytest.raises(ValueError, match=r'`hf download Org/Tiny --include "\*\.json"`'):
            predict(named)
        assert site.asked == []
        monkeypatch.setenv(hub.MODELS, "Org/Tiny")
        planned = predict(named)
        assert not [path for path in site.asked if ".safetensors" in path]
    [weights] = (RECIPES / "tiny" / "model" / "transformer").glob("*.safetensors")
    assert planned.params == sum(tensor.numel() for tensor in load_file(weights).values())
