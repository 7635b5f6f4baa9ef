"""A model brought to another folder: from a real controller process, checked, merged into its base, and pushed."""

import asyncio
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import save_file
from typer.testing import CliRunner

from flowfleet.api.jobs import Checkpoint
from flowfleet.api.problems import ApiError
from flowfleet.cli import main as cli
from flowfleet.client import download as downloads
from flowfleet.client.client import Client
from flowfleet.client.download import MARK, download
from flowfleet.client.models.merging import merge
from flowfleet.job.model_files import ModelManifest, check_name, read_manifest
from tests.flowfleet.conftest import IdleController
from tests.flowfleet.idle_controller import in_store, job_settings
from tests.models_on_disk import write_model

WEIGHTS = bytes(range(256)) * 20_000
NAME = "transformer_2/adapter_model.safetensors"


@pytest.fixture
def client(api_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(downloads, "DELAY_S", 0.01)
    monkeypatch.setenv("FLOWFLEET_URL", api_url)
    with Client(api_url) as client:
        yield client


@pytest.fixture
def job(client: Client, idle_controller: IdleController, tmp_path: Path) -> tuple[str, Path]:
    """A job's id, and its folder with the model of its checkpoint of step 4."""
    job_id = client.submit(job_settings(tmp_path, name="signs")).id
    folder = idle_controller.state_dir / "jobs" / job_id
    write_model(folder / "checkpoints" / "step-00000004" / "model", job_id, 4, WEIGHTS)
    return job_id, folder


def test_a_model_comes_whole_and_once(client: Client, job: tuple[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "here"
    found = client.download_model(job[0], folder)
    assert (found, read_manifest(folder)) == (client.model(job[0], 4), found)
    assert (folder / NAME).read_bytes() == WEIGHTS
    assert not list(folder.rglob(".*"))
    written = (folder / NAME).stat().st_mtime_ns
    (folder / "README.md").write_text("lost")
    client.download_model(job[0], folder, 4)
    assert ((folder / "README.md").read_text(), (folder / NAME).stat().st_mtime_ns) == ("# card", written)


def test_what_else_lies_there_is_left_alone(client: Client, job: tuple[str, Path], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("my own")
    with pytest.raises(ValueError, match="give a new folder"):
        client.download_model(job[0], tmp_path / "mine")
    assert (tmp_path / "mine" / "README.md").read_text() == "my own"
    client.download_model(job[0], tmp_path / "here")
    write_model(job[1] / "model", job[0], 5, b"newer")
    with pytest.raises(ValueError, match="holds another model"):
        client.download_model(job[0], tmp_path / "here")


def test_a_damaged_file_is_not_taken(client: Client, job: tuple[str, Path], tmp_path: Path) -> None:
    file = job[1] / "checkpoints" / "step-00000004" / "model" / NAME
    file.write_bytes(WEIGHTS[:-1] + b"x")
    with pytest.raises(ApiError, match=f"{NAME} arrived damaged: {len(WEIGHTS)} bytes with the CRC-32"):
        client.download_model(job[0], tmp_path / "here")
    assert not (tmp_path / "here" / NAME).exists()
    file.write_bytes(WEIGHTS)
    client.download_model(job[0], tmp_path / "here")
    assert (tmp_path / "here" / NAME).read_bytes() == WEIGHTS


def test_a_download_goes_on_after_its_client_was_killed(client: Client, job: tuple[str, Path], tmp_path: Path) -> None:
    """Its mark tells whose the folder is."""
    manifest = client.model(job[0])

    async def ask() -> ModelManifest:
        return manifest

    @asynccontextmanager
    async def killed(name: str, crc32: str) -> AsyncIterator[AsyncIterator[bytes]]:
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(download(ask, killed, tmp_path / "here"))
    assert (tmp_path / "here" / MARK).is_file()
    client.download_model(job[0], tmp_path / "here")
    assert not (tmp_path / "here" / MARK).exists()


def test_a_hostile_manifest_writes_nowhere_else(tmp_path: Path) -> None:
    def fetch(name: str, crc32: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        raise AssertionError("nothing is fetched")

    async def ask() -> ModelManifest:
        return manifest

    for name in ("../x", "/etc/x", "a/../../x", "a\\..\\x", "", ".", "a//b", "C:/x", "a\nb", "./a"):
        with pytest.raises(ValueError, match="not a plain path"):
            check_name(name)
        manifest = ModelManifest.model_validate(
            {"job_id": "j", "step": 1, "kind": "adapter", "weights": "trained", "base_model": "b", "dtype": "float32"}
            | {"files": {name: {"size_bytes": 1, "crc32": "00000000"}}}
        )
        with pytest.raises(ValueError, match="not a plain path"):
            asyncio.run(download(ask, fetch, tmp_path / "here"))
    assert not (tmp_path / "here").exists()


def test_the_commands(client: Client, job: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["export", job[0]])
    assert done.stdout == "signs-step-4: adapter of 4 steps, trained weights\n"
    assert (tmp_path / "signs-step-4" / NAME).is_file()
    assert CliRunner().invoke(cli.app, ["export", job[0], "--step", "4", "--out", "there"]).exit_code == 0
    assert "no checkpoint of step 3" in CliRunner().invoke(cli.app, ["export", job[0], "--step", "3"]).stderr
    assert "cancel it" in CliRunner().invoke(cli.app, ["finish", job[0]]).stderr
    assert "queued, to be running" in CliRunner().invoke(cli.app, ["extend", job[0], "--steps", "500"]).stdout


def test_an_adapter_is_merged_into_its_base(tiny_qwen_image: Path, tmp_path: Path) -> None:
    """Fuses like diffusers; the base is unchanged."""
    pipeline: Any = QwenImagePipeline.from_pretrained(tiny_qwen_image)
    before = {name: tensor.clone() for name, tensor in pipeline.transformer.state_dict().items()}
    target = next(name for name in before if name.endswith("attn.to_q.weight")).removesuffix(".weight")
    generator = torch.Generator().manual_seed(0)
    size = before[f"{target}.weight"].shape
    factors = {
        f"{target}.lora_A.weight": torch.randn(3, size[1], generator=generator),
        f"{target}.lora_B.weight": torch.randn(size[0], 3, generator=generator),
    }
    from safetensors.torch import save_file

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({f"base_model.model.{name}": tensor for name, tensor in factors.items()}, adapter / "adapter_model.safetensors")  # fmt: skip  # noqa: E501
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 6}))
    merge(tiny_qwen_image, adapter, tmp_path / "merged")
    merged: Any = QwenImagePipeline.from_pretrained(tmp_path / "merged")
    added = 2.0 * factors[f"{target}.lora_B.weight"].double() @ factors[f"{target}.lora_A.weight"].double()
    for name, tensor in merged.transformer.state_dict().items():
        expected = before[name].double() + (added if name == f"{target}.weight" else 0)
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-6)
    again: Any = QwenImagePipeline.from_pretrained(tiny_qwen_image)
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.transformer.state_dict().items())
    save_file({"base_model.model.nowhere.lora_A.weight": torch.zeros(3, 2)}, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="adapter is of another model"):
        merge(tiny_qwen_image, adapter, tmp_path / "other")
    assert not (tmp_path / "other").exists()


# A hub ----------------------------------------------------------------------------------------------------------------


class Hub(http.server.BaseHTTPRequestHandler):
    """What of the hub's HTTP API an upload needs; keeps what it was given."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    blobs: dict[str, bytes]
    asked: list[str]
    refuses = False

    def do_POST(self) -> None:
        body, path = self._body(), self.path.partition("?")[0]
        self.asked.append(path)
        if self.headers.get("authorization") != "Bearer hf_test" or self.refuses:
            self._answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
        elif path == "/api/repos/create":
            self._answer({"url": f"http://{self.headers['host']}/org/signs", "id": "org/signs"})
        elif path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            is_large = [file["path"].endswith(".safetensors") for file in files]
            modes = ["lfs" if large else "regular" for large in is_large]
            told = [
                {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
                for file, mode in zip(files, modes, strict=True)
            ]
            self._answer({"files": told})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**wanted, "actions": {"upload": {"href": f"http://{self.headers['host']}/put/{wanted['oid']}"}}}
                for wanted in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects}, kind="application/vnd.git-lfs+json")
        elif path.endswith("/commit/main"):
            self._commit([json.loads(line) for line in body.splitlines()])
        else:
            self._answer({"errors": [], "warnings": []})

    def do_PUT(self) -> None:
        self.blobs[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_GET(self) -> None:
        self._answer({"id": "org/signs", "sha": "0" * 40, "siblings": [], "private": False, "downloads": 0})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        import base64

        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.blobs[value["oid"]]
        self._answer(
            {
                "success": True,
                "commitOid": "1" * 40,
                "commitUrl": f"http://{self.headers['host']}/org/signs/commit/{'1' * 40}",
                "hookOutput": "",
            }
        )

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def _answer(self, value: dict[str, Any], status: int = 200, kind: str = "application/json") -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def hub() -> Iterator[tuple[str, type[Hub]]]:
    kind = type("OneHub", (Hub,), {"files": {}, "blobs": {}, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", kind
    server.shutdown()


def test_a_model_is_pushed_to_a_hub(
    client: Client, job: tuple[str, Path], hub: tuple[str, type[Hub]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushes in a separate process, which reads the hub's address from the environment."""
    url, kind = hub
    for name, value in {"HF_ENDPOINT": url, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    command = [sys.executable, "-m", "flowfleet.cli.main", "push", job[0], "org/signs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"{url}/org/signs" in done.stdout
    assert set(kind.files) == {"README.md", NAME, "flowfleet.json"}
    assert (kind.files[NAME], kind.files["README.md"]) == (WEIGHTS, b"# card")
    kind.refuses = True
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "the hub refused the upload to org/signs" in refused.stderr
    assert "Traceback" not in refused.stderr
    named = subprocess.run([*command[:-1], "signs"], capture_output=True, text=True, timeout=60)
    assert "give ORG/NAME" in named.stderr
    for name, value in (("HF_ENDPOINT", "http://127.0.0.1:9"), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)
        away = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (away.returncode, "Traceback" in away.stderr) == (1, False)
        assert "cannot be reached" in away.stderr
        assert "HF_ENDPOINT" in away.stderr


# Continued ------------------------------------------------------------------------------------------------------------


def test_a_job_is_continued_as_a_new_one(
    client: Client, job: tuple[str, Path], redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job_id, folder = job
    nothing = CliRunner().invoke(cli.app, ["submit", "--from", job_id])
    assert "has no checkpoint of step any; kept are: none" in nothing.stderr
    for step in (2, 4):
        record = Checkpoint(step=step, path=str(folder), created_at=datetime.now(UTC))
        in_store(redis_url, lambda store, record=record: store.history.add_checkpoint(job_id, record))  # type: ignore[misc]
    checkpoint = folder / "checkpoints" / "step-00000004"
    (checkpoint / "state.json").write_text("{}")
    again = CliRunner().invoke(cli.app, ["submit", "--from", job_id, "--set", "schedule.steps=7"])
    assert again.exit_code == 0, again.stderr
    resumed = client.job(again.stdout.strip())
    assert (resumed.spec["trainer"]["resume"], resumed.progress.steps) == (f"job:{job_id}@4", 7)
    assert resumed.spec["model"] == client.job(job_id).spec["model"]
    gone = CliRunner().invoke(cli.app, ["submit", "--from", f"{job_id}@2"])
    assert "job:" in gone.stderr
    assert "no checkpoint of step 2" in gone.stderr

    shapes = {"A": (4, 8), "B": (8, 4)}
    factors = {f"transformer.to_q.lora_{side}.weight": torch.zeros(shape) for side, shape in shapes.items()}
    save_file(factors, checkpoint / "model" / "pytorch_lora_weights.safetensors")
    file = tmp_path / "next.json"
    file.write_text(json.dumps(job_settings(tmp_path, algorithm={"name": "diffusion_nft"})))
    for origin, adapter in ((job_id, f"job:{job_id}"), (f"{job_id}@4", f"job:{job_id}@4")):
        warm = CliRunner().invoke(cli.app, ["submit", str(file), "--from", origin])
        assert warm.exit_code == 0, warm.stderr
        spec = client.job(warm.stdout.strip()).spec
        assert (spec["model"]["adapter"], spec["algorithm"]["name"]) == (adapter, "diffusion_nft")
    for words, said in ((["submit"], "--from ID"), (["submit", "--from", f"{job_id}@x"], "ID@STEP")):
        assert said in CliRunner().invoke(cli.app, words).stderr
