"""The command that adds an extra leaves a checkout editable, and works where the package is not on an index."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowfleet import extras

ROOT = Path(__file__).parents[2]


def test_in_a_checkout_it_is_editable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert extras.pip_install("hub") == f"pip install -e '{ROOT}[hub]'"
    monkeypatch.chdir(ROOT)
    assert extras.pip_install("hub") == "pip install -e '.[hub]'"


@pytest.mark.parametrize("kind", ["copy", "moved", "wheel", "index", "none"])
def test_elsewhere_it_names_where_pip_found_it(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "my checkout"
    source.mkdir()
    origins: dict[str, dict[str, Any] | None] = {
        "copy": {"url": source.as_uri(), "dir_info": {}},
        "moved": {"url": (tmp_path / "gone").as_uri(), "dir_info": {}},
        "wheel": {"url": (tmp_path / "x.whl").as_uri(), "archive_info": {}},
        "index": None,
    }

    def distribution(name: str) -> Any:
        if kind == "none":
            raise PackageNotFoundError(name)
        origin = origins[kind]
        return SimpleNamespace(read_text=lambda file: None if origin is None else json.dumps(origin))

    monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
    monkeypatch.setattr("importlib.metadata.distribution", distribution)
    assert extras.pip_install("hub") == f"pip install '{source if kind == 'copy' else 'flowfleet'}[hub]'"


def test_texts_install_what_a_checkout_has() -> None:
    """Pages install editable; messages ask `pip_install`."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.ipynb")]
    code = [file for part in ("flowfleet", "services") for file in (ROOT / part).rglob("*.py")]
    copied = re.compile(r"pip install (?:'?\.|'?flowfleet)|install (?:the extra )?flowfleet\[")
    found = [file for file in (*pages, *code) if file.name != "extras.py" and copied.search(file.read_text())]
    assert found == []
