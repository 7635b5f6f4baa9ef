"""`flowfleet submit --check` on the Hub's stand-in and on files."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowfleet.cli.main import app
from tests.flowfleet.prompts.hub_site import hub_site

JOB = """
rewards.ocr = {}
model.path = "m"
[data]
"""


def check(tmp_path: Path, data: str) -> tuple[int, str]:
    (tmp_path / "job.toml").write_text(JOB + data)
    result = CliRunner().invoke(app, ["submit", str(tmp_path / "job.toml"), "--check"])
    return result.exit_code, " ".join(result.output.split())


def test_files_are_counted_and_their_faults_named(tmp_path: Path) -> None:
    (tmp_path / "good.csv").write_text("prompt,target\na [b]c,x\nd,y\n")
    (tmp_path / "bad.jsonl").write_text('{"promt": "a"}')
    code, output = check(tmp_path, 'train = "good.csv"')
    assert (code, output) == (0, "data.train: 2 prompts, first 'a [b]c' metadata: target")
    code, output = check(tmp_path, 'train = "good.csv"\nvalidation = "bad.jsonl"')
    assert code == 1
    assert "data.validation: " in output
    assert "nearly 'prompt'" in output
    code, output = check(tmp_path, 'train = "absent.csv"')
    assert (code, "No such file" in output) == (1, True)


def test_the_hub_is_asked_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    folder = tmp_path / "hub/org/lines"
    folder.mkdir(parents=True)
    (folder / "train.csv").write_text("prompt\na\nb\n")
    with hub_site(tmp_path / "hub") as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert check(tmp_path, 'train = "hf://datasets/org/lines"') == (0, "data.train: 2 prompts, first 'a'")
        code, output = check(tmp_path, 'train = "hf://datasets/org/absent"')
    assert (code, "org/absent" in output) == (1, True)
