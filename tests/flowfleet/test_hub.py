"""Models of the Hub by name, against a stand-in of its HTTP API."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfleet import hub
from flowfleet.models.registry import family_of
from tests.hub_models import NEW, OLD, Site, served

constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with served(tmp_path, monkeypatch) as found:
        yield found


def files_below(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def test_a_name_is_not_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.name_of("Qwen/Qwen-Image") == hub.HubName("Qwen/Qwen-Image")
    assert hub.name_of("Qwen/Qwen-Image@refs/pr/3") == hub.HubName("Qwen/Qwen-Image", "refs/pr/3")
    for path in ("models/mine", "/Qwen/Qwen-Image", "./a/b", "a/b/c", "a", "../a", "a/..", "job:1/2", "s3://a/b"):
        assert hub.name_of(path) is None, path
    assert hub.name_of(f"models/{'x' * 300}") is not None  # no file can have this name, and asking for it is no error


def test_a_pipeline_is_downloaded_as_far_as_it_is_read(site: Site) -> None:
    folder = hub.pipeline("Org/Model")
    assert folder.name == OLD
    assert files_below(folder) == {
        "model_index.json",
        "scheduler/scheduler_config.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
    }
    assert hub.origin_of(folder) == hub.HubName("Org/Model", OLD)
    assert family_of("Org/Model").title == "Qwen-Image"


def test_a_pin_holds_when_the_model_changes(site: Site) -> None:
    pinned = hub.pin("Org/Model@main")
    assert pinned == f"Org/Model@{OLD}"
    hub.pipeline(pinned)
    site.commit.insert(0, NEW)
    site.asked.clear()
    assert hub.pin(pinned) == pinned
    assert hub.pipeline(pinned).name == OLD
    assert site.asked == []  # a restart needs no Hub
    assert hub.pin("Org/Model") == f"Org/Model@{NEW}"


def test_configurations_are_few_files(site: Site) -> None:
    expected = {"model_index.json", "transformer/config.json", "scheduler/scheduler_config.json"}
    assert files_below(hub.configurations("Org/Model")) == expected


@pytest.mark.parametrize("setting", [(hub.MODELS, ""), (hub.MODELS, "Other,Org/Other"), (hub.OFFLINE, "1")])
def test_without_leave_only_the_cache_is_read(
    site: Site, setting: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.configurations("Org/Model")
    monkeypatch.setenv(*setting)
    site.asked.clear()
    assert hub.pin("Org/Model") == f"Org/Model@{OLD}"
    with pytest.raises(ValueError, match=f"not, or not whole, in .*: run `hf download Org/Model --revision {OLD}`"):
        hub.pipeline(f"Org/Model@{OLD}")  # the weights are not there
    with pytest.raises(ValueError, match=r'`hf download Org/Absent --include "\*.json"`.*--hub-model Org/Absent'):
        hub.configurations("Org/Absent")
    assert site.asked == []


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("Org/Absent", "the Hub has no such model, or it is private"),
        ("Org/Model@nowhere", "it has no revision 'nowhere' there"),
    ],
)
def test_what_the_hub_refuses_is_said(site: Site, place: str, reason: str) -> None:
    for ask in (hub.pin, hub.pipeline):
        with pytest.raises(ValueError, match=reason):
            ask(place)


def test_a_hub_that_is_away_is_said(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for ask in (hub.pin, hub.pipeline):
        with pytest.raises(ValueError, match=r"the Hub did not give .*ConnectError.*hf download Org/Model"):
            ask("Org/Model")


def test_an_interrupted_download_is_completed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.pipeline("Org/Model")
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    monkeypatch.setenv(hub.OFFLINE, "1")
    with pytest.raises(ValueError, match="not whole"):
        hub.pipeline("Org/Model")
    monkeypatch.delenv(hub.OFFLINE)
    assert (hub.pipeline("Org/Model") / "transformer" / "diffusion_pytorch_model.safetensors").is_file()


def test_a_download_beats_while_it_grows_whoever_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "LOOK_S", 0.02)
    beats, stalled = list[int](), threading.Event()

    def fetch() -> None:
        for number in range(3):
            (tmp_path / str(number)).write_text("more")
            seen = len(beats)
            deadline = time.monotonic() + 10
            while len(beats) == seen and time.monotonic() < deadline:
                time.sleep(0.005)
        assert len(beats) == 3
        time.sleep(0.1)  # stalls: no beat
        stalled.set()

    hub._watched(fetch, tmp_path, hub.HubName("Org/Model"), lambda: beats.append(threading.get_ident()))
    assert stalled.is_set()
    assert beats == [threading.get_ident()] * 3


def test_a_checkpoint_of_transformers_is_one_folder(site: Site) -> None:
    shutil.rmtree(site.root)
    site.root.mkdir()
    for name in ("config.json", "model.safetensors", "open_clip_model.safetensors", "vocab.json", "model.bin"):
        (site.root / name).write_text("{}")
    assert files_below(hub.checkpoint("Org/Model")) == {"config.json", "model.safetensors", "vocab.json"}


def test_a_list_names_organizations_and_models() -> None:
    assert hub.parse_list("Qwen, black-forest-labs/FLUX.1-dev,*") == ("Qwen", "black-forest-labs/FLUX.1-dev", "*")
    for wrong in ("a/b/c", "https://x", "Org/*", "-x"):
        with pytest.raises(ValueError, match="neither ORG nor ORG/NAME"):
            hub.parse_list(wrong)
