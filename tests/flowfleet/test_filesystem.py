"""Errors of disks name the path; paths that a locale cannot hold are refused in a sentence."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flowfleet.api.samples import Sample
from flowfleet.api.votes import keep
from flowfleet.cli.samples.command import _save
from flowfleet.filesystem import check_names, writing
from flowfleet.local.files import write_atomically
from flowfleet.prompts.prompt import Prompt
from flowfleet.tracking.place import Place, State
from services.controller.job.reporting.metrics_file import MetricsFile
from services.controller.reading.packed import Packer, Prompts

SAMPLE = Sample(step=0, group=0, index=0, purpose="train", prompt="a", media_type="image/png")


def _packed(folder: Path) -> None:
    prompts = Prompts(folder, "")
    packer = Packer(prompts.descriptor, 0, 0, 1 << 20)
    packer.add(Prompt("a"), 0, 1)
    packer.flush()


WRITERS: dict[str, Callable[[Path], object]] = {
    "stack's file": lambda folder: write_atomically(folder / "a.json", "{}"),
    "vote's picture": lambda folder: keep(folder / "a.png", b"x"),
    "sample's picture": lambda folder: _save(b"x", SAMPLE, folder),
    "tracker's place": lambda folder: Place(folder, "job").write(State()),
    "job's metrics": lambda folder: MetricsFile(folder / "metrics.jsonl")._write({"step": 1}),
    "prompts": _packed,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_write_that_the_disk_refuses_names_the_path(name: str, tmp_path: Path) -> None:
    """A limit on files stands for a full disk: `write` fails alike, with no path in the error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        with pytest.raises(OSError, match="File too large") as refused:
            WRITERS[name](tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert str(tmp_path if name != "prompts" else "state directory") in str(refused.value)


def test_an_error_that_names_a_path_keeps_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing, writing(tmp_path / "other"):
        (tmp_path / "none").read_text()
    assert missing.value.filename == str(tmp_path / "none")


def test_names_of_other_encodings_are_refused() -> None:
    check_names(["é", "plain"])
    with pytest.raises(ValueError, match=r"/data/\?: this locale .* cannot hold the name: set LC_ALL=C.UTF-8"):
        check_names(["plain", "/data/" + "é".encode().decode("ascii", "surrogateescape")])


@pytest.mark.parametrize(
    "command",
    [
        ["flowfleet.cli", "up", "--state-dir", "é"],
        ["flowfleet.cli", "submit", "é/job.toml"],
        ["services.controller", "--state-dir", "é"],
    ],
)
def test_a_folder_under_an_ascii_locale_is_a_sentence(command: list[str], tmp_path: Path) -> None:
    locale = {
        "FLOWFLEET_REDIS_URL": "redis://localhost:1",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, env={**os.environ, **locale}, capture_output=True, timeout=60
    )
    said = done.stderr.decode(errors="replace")
    assert done.returncode in (1, 2)
    assert "this locale (ascii) cannot hold the name: set LC_ALL=C.UTF-8, or PYTHONUTF8=1" in said
    assert "Traceback" not in said
