"""`flowfleet track --wandb` offline: what its files hold."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowfleet.client import Client
from tests.flowfleet.conftest import IdleController
from tests.flowfleet.tracking.played_job import FollowerProcess, PlayedJob, reward, rewards_of
from tests.models_on_disk import write_model

pytest.importorskip("wandb", reason="it is in flowfleet[wandb]")

from wandb.proto import wandb_internal_pb2 as messages

BLOCK, FULL, LAST = 2**15, 1, 4
RECORD = messages.__dict__["Record"]
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}


def records(file: Path) -> Iterator[Any]:
    """A W&B file is a log of LevelDB behind a header of 7 bytes: blocks of 32 KiB, in which a record has a header of
    7 bytes (CRC, length, type), or several where it does not fit."""
    data, place, parts = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (FULL, LAST):
            yield RECORD.FromString(parts)
            parts = b""


def rows(files: list[Path]) -> list[dict[str, Any]]:
    """History of all files, in order."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for file in files
        for record in records(file)
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.mark.long
def test_a_run_goes_on_after_a_kill(
    idle_controller: IdleController, api_url: str, redis_url: str, tmp_path: Path
) -> None:
    with Client(api_url) as client:
        job = PlayedJob(redis_url, client, tmp_path)
    folder = tmp_path / "runs/track/wandb"
    follower = FollowerProcess(
        api_url, job.id, ["--wandb"], tmp_path, folder, {**OFFLINE, "WANDB_DATA_DIR": str(tmp_path / "data")}
    )
    job.validate(0)
    job.train(0, 1)
    follower.start()
    follower.wait_for(lambda state: (state.step, state.version) == (1, 0))
    follower.kill()
    job.train(2)
    write_model(idle_controller.state_dir / "jobs" / job.id / "model", job.id, 3, b"weights")
    job.end()
    follower.start()
    assert "the job succeeded" in follower.ended()

    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert {file.name for file in files} == {f"run-{job.id}.wandb"}, "both are of one run"
    found = rows(files)
    trained = [(row["step"], row["critic/rewards/mean"]) for row in found if "step" in row]
    assert trained == [(step, reward(step)) for step in range(3)]
    assert [row["_step"] for row in found] == list(range(4)), "W&B drops a number that it has"
    values, bins = (found[-1][f"histograms/rewards/{name}"] for name in ("values", "bins"))
    assert (sum(values), bins[0], bins[-1]) == (8, rewards_of(2)[0], rewards_of(2)[-1])
    (shown,) = [row["pictures/path"] for row in found if "pictures/path" in row]
    (table,) = (json.loads(path.read_text()) for path in folder.rglob(f"files/**/{Path(shown).name}"))
    assert table["columns"] == ["version", "prompt", "picture", "reward", "ocr", "ocr.exact"]
    assert [row[1] for row in table["data"]] == ['a sign that says "K7QX"', "a boat | a moat"]
    staged = [path.read_text(errors="replace") for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert any("image-file" in text for text in staged), "the table that W&B uploads has the pictures"
    config = {
        item.key: json.loads(item.value_json)
        for record in records(files[0])
        if record.WhichOneof("record_type") == "run"
        for item in record.run.config.update
    }
    assert config["seed"] == 3
    logged = [
        record.request.log_artifact.artifact.name if record.HasField("request") else record.artifact.name
        for record in records(files[1])
        if record.WhichOneof("record_type") in ("artifact", "request")
    ]
    assert f"adapter-{job.id}" in logged
