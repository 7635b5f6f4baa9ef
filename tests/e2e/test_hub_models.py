"""A job whose model is a name of the Hub, downloaded by the services of a stack; against a stand-in of the Hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT
from tests.flowfleet.prompts.hub_site import COMMIT, hub_site

pytest.importorskip("huggingface_hub")


@pytest.mark.long
def test_services_download_the_model_that_a_job_names(
    make_fleet: Callable[..., Any], small_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "recipes/tiny/model", tmp_path / "hub" / "Org" / "Tiny")
    with hub_site(tmp_path / "hub") as endpoint:
        settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_secret_of_the_operator"}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        with make_fleet(model=None, hub_models=("Org",)) as fleet:
            job = fleet.run(small_job(**{"model.path": "Org/Tiny", "schedule.steps": 1, "schedule.save_every": 1}))
            assert job.status == "succeeded", job.reason
            assert job.spec["model"]["path"] == f"Org/Tiny@{COMMIT}"
            folder = tmp_path / "model"
            fleet.client.download_model(job.id, folder)
            state = Path(fleet.stack.state_dir)
    card, config = (folder / "README.md").read_text(), json.loads((folder / "adapter_config.json").read_text())
    assert "base_model: Org/Tiny\n" in card
    assert f'from_pretrained("Org/Tiny", revision="{COMMIT}"' in card
    assert (config["base_model_name_or_path"], config["revision"]) == ("Org/Tiny", COMMIT)
    told = [file for file in state.rglob("*") if file.is_file() and b"hf_secret" in file.read_bytes()]
    assert told == []  # no log, no record
