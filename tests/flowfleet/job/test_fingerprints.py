"""Fingerprints are equal for copies, and differ for whatever a process would load otherwise."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowfleet.job import fingerprints as prints
from flowfleet.job.fingerprints import CHANGED, change, differ, fingerprint, inputs_of
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


EXTRAS: dict[str, Callable[[Path], object]] = {
    "a link to nothing": lambda place: place.symlink_to("nowhere"),
    "a link to itself": lambda place: place.symlink_to(place),
    "a link below a file": lambda place: place.symlink_to("model_index.json/more"),
    "a pipe that has no writer": os.mkfifo,
    "a folder of that name": Path.mkdir,
}


@pytest.mark.parametrize("name", EXTRAS)
def test_what_is_no_file_is_absent(name: str, model: Path, tmp_path: Path) -> None:
    before = fingerprint(model)
    EXTRAS[name](model / "extra.json")
    assert fingerprint(model) == before
    EXTRAS[name](tmp_path / "alone.json")
    assert fingerprint(tmp_path / "alone.json") == ""


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("call", ["stat", "open"])
def test_of_an_unreadable_file_the_name_counts(
    call: str, code: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors as a file of another user's, or of a server that lost it, gives them: tests may run as root."""
    without, extra, real = fingerprint(model), model / "extra.json", getattr(Path, call)
    extra.write_text("{}")

    def refusing(path: Path, *args: Any, **options: Any) -> Any:
        if path == extra:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **options)

    readable = fingerprint(model)
    monkeypatch.setattr(Path, call, refusing)
    unread = fingerprint(model)
    assert unread == fingerprint(model) not in ("", without, readable)
    assert not differ(readable, unread)  # another process reads what this one cannot
    (model / "model_index.json").write_text("{} ")
    assert differ(unread, fingerprint(model))


def test_fingerprints_of_another_format_are_not_compared(model: Path) -> None:
    """The digest is written down here: raise the format when what it is of changes."""
    assert fingerprint(model) == "1:3bc04f1966e5aac1f028c2a9fb870866a33ccf3e5f6715bfc51eb7b078c37dfd"
    for known in ("", "2:x", "x"):  # none; of a later release; of one before formats
        assert not change({"model.path": known}, {"model.path": fingerprint(model)}, {})


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


def changed_byte_alone(file: Path) -> None:
    before = file.stat()
    changed_byte(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def copied_over(file: Path) -> None:
    os.replace(shutil.copy2(file, file.with_name("copy")), file)


@pytest.mark.parametrize("alter", [None, changed_byte, changed_byte_alone, copied_over])
def test_a_file_is_read_again_where_it_was_changed(
    alter: Callable[[Path], object] | None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is always read until it is settled: two changes may have one time."""
    file, reads, content = model / "transformer/weights.safetensors", list[Path](), prints._content

    def reading(file: Path) -> str:
        reads.append(file)
        return content(file)

    monkeypatch.setattr(prints, "_content", reading)
    monkeypatch.setattr(prints, "_SETTLED_S", 1e6)
    first = fingerprint(model)
    assert fingerprint(model) == first
    assert reads.count(file) == 2
    monkeypatch.setattr(prints, "_SETTLED_S", 0.0)
    time.sleep(0.02)
    assert fingerprint(model) == fingerprint(model) == first
    assert reads.count(file) == 3
    if alter is not None:
        alter(file)
        time.sleep(0.02)
    assert (fingerprint(model) == first) == (alter in (None, copied_over))
    assert reads.count(file) == (3 if alter is None else 4)


def test_a_reason_names_the_setting_and_its_place(model: Path) -> None:
    part = {"path": str(model), "adapter": "a.safetensors"}
    spec = parse_job({"model": part, "rewards": {"ocr": {}}, "data": {"train": "t"}})
    assert inputs_of(spec) == {"model.path": str(model), "model.adapter": "a.safetensors"}
    known = {"model.path": fingerprint(model), "model.adapter": "1:x", "data.train": "1:x"}
    assert change(known, {"model.path": known["model.path"]}, inputs_of(spec)) == ""  # the adapter is gone by now
    assert f"model.path: {model} {CHANGED}" in change(known, {"model.path": "1:y"}, inputs_of(spec))
    assert f"data.train: its data {CHANGED}" in change(known, {"data.train": "1:y"}, inputs_of(spec))
