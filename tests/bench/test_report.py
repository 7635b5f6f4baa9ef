"""Tables, files and the machine of a report."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import report

FOLDER = report.ROOT / "bench"
SCRIPTS = [path.stem for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text()]
SCRIPTS += [path.parent.name for path in sorted(FOLDER.glob("*/__main__.py"))]


def test_a_table_shows_four_digits_and_figures_inside_others() -> None:
    rows: list[dict[str, Any]] = [{"a": 1.23456, "b": {"c": None}}, {"a": "x", "b": {"c": 20_000}}]
    assert report.table(rows, ["a", "b.c", "d"]).splitlines() == [
        "| a     | b.c   | d |",
        "|-------|-------|---|",
        "| 1.235 | –     | – |",
        "| x     | 20000 | – |",
    ]


def test_tiny_figures_never_replace_real_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    report.finish("one", argparse.Namespace(json=None, tiny=True), [{"a": 1}], ["a"])
    report.finish("one", argparse.Namespace(json=None, tiny=False), [{"a": 2}], ["a"])
    assert {path.name: json.loads(path.read_text())["figures"] for path in tmp_path.iterdir()} == {
        "one-tiny.json": [{"a": 1}],
        "one.json": [{"a": 2}],
    }


def test_the_machine_has_cores_and_torch() -> None:
    found = report.machine()
    assert found["cores"] >= 1
    assert "torch" in found


def test_a_child_has_a_process_of_its_own() -> None:
    assert report.in_child(os.getpid) != os.getpid()


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_what_it_measures(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"bench.{name}", "--help"], capture_output=True, text=True, check=True)
    assert f"python -m bench.{name}" in done.stdout
    assert f"| [{name}]" in (report.ROOT / "bench/README.md").read_text()
