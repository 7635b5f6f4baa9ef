"""A model on a stand-in of the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowfleet import hub
from tests.flowfleet.prompts.hub_site import hub_site

OLD, NEW = "1" * 40, "2" * 40
INDEX = {
    "_class_name": "QwenImagePipeline",
    "transformer": ["diffusers", "QwenImageTransformer2DModel"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "safety_checker": [None, None],
}
FILES = {
    "model_index.json": json.dumps(INDEX),
    "README.md": "card",
    "whole.safetensors": "one file of all, which no pipeline reads",
    "scheduler/scheduler_config.json": "{}",
    "transformer/config.json": "{}",
    "transformer/diffusion_pytorch_model.safetensors": "weights",
    "transformer/diffusion_pytorch_model.fp16.safetensors": "the same again",
    "transformer/pytorch_model.bin": "pickle",
    "safety_checker/model.safetensors": "left out",
}


class Site:
    def __init__(self, root: Path) -> None:
        self.root, self.commit, self.asked = root, [OLD], list[str]()


@contextmanager
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Serves Org/Model to huggingface_hub of this process, which caches in `tmp_path`."""
    from huggingface_hub import constants

    found = Site(tmp_path / "hub" / "Org" / "Model")
    for name, text in FILES.items():
        (found.root / name).parent.mkdir(parents=True, exist_ok=True)
        (found.root / name).write_text(text)
    with hub_site(tmp_path / "hub", found.commit, found.asked) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv(hub.MODELS, "Org")
        monkeypatch.delenv(hub.OFFLINE, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "LOOK_S", 0.02)
        yield found
