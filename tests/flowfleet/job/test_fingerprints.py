"""Fingerprints are equal for copies, and differ for whatever a process would load otherwise."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flowfleet.job import fingerprints as prints
from flowfleet.job.fingerprints import CHANGED, change, fingerprint, inputs_of
from flowfleet.job.spec import parse_job


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "transformer").mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    (folder / "transformer" / "weights.safetensors").write_bytes(bytes(range(256)) * 64)
    return folder


def changed_byte(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9] + b"!" + file.read_bytes()[-8:])


CHANGES: dict[str, Callable[[Path], object]] = {
    "a byte": lambda model: changed_byte(model / "transformer/weights.safetensors"),
    "longer": lambda model: (model / "model_index.json").write_text("{} "),
    "another file": lambda model: (model / "transformer/more.safetensors").write_bytes(b"x"),
    "renamed": lambda model: (model / "transformer").rename(model / "vae"),
    "gone": lambda model: (model / "model_index.json").unlink(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_loaded_counts(name: str, model: Path) -> None:
    before = fingerprint(model)
    CHANGES[name](model)
    assert fingerprint(model) != before


def test_times_places_links_and_what_nobody_loads_do_not_count(model: Path, tmp_path: Path) -> None:
    before = fingerprint(model)
    (model / "README.md").write_text("a card")
    (model / ".cache").mkdir()
    (model / ".cache" / "more.json").write_text("{}")
    os.utime(model / "model_index.json", (1, 1))
    copy = shutil.copytree(model, tmp_path / "copy")
    shutil.move(copy / "transformer", tmp_path / "elsewhere")
    (copy / "transformer").symlink_to(tmp_path / "elsewhere")
    (copy / "round").symlink_to(copy)
    assert fingerprint(model) == fingerprint(copy) == before


def test_a_large_file_is_read_in_parts_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor as large as the stride is always seen, and the header."""
    monkeypatch.setattr(prints, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(prints, "_STRIDE", 500)
    monkeypatch.setattr(prints, "_PIECE", 10)
    file, content = tmp_path / "w.safetensors", bytearray(5003)
    file.write_bytes(content)
    seen = {fingerprint(file)}
    for start in (*range(0, 4500, 500), 4993):
        file.write_bytes(content[:start] + b"\1" * min(500, len(content) - start) + content[start + 500 :])
        seen.add(fingerprint(file))
    assert len(seen) == 11


def test_a_reason_names_the_setting_and_its_place(model: Path) -> None:
    part = {"path": str(model), "adapter": "a.safetensors"}
    spec = parse_job({"model": part, "rewards": {"ocr": {}}, "data": {"train": "t"}})
    assert inputs_of(spec) == {"model.path": str(model), "model.adapter": "a.safetensors"}
    known = {"model.path": fingerprint(model), "model.adapter": "x", "data.train": "x"}
    assert change(known, {"model.path": known["model.path"]}, inputs_of(spec)) == ""  # the adapter is gone by now
    assert f"model.path: {model} {CHANGED}" in change(known, {"model.path": "y"}, inputs_of(spec))
    assert f"data.train: its data {CHANGED}" in change(known, {"data.train": "y"}, inputs_of(spec))
