"""Files that users write: with and without a byte order mark, and in other encodings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowfleet.job.setting_files import read_extended, read_table
from flowfleet.text_files import read_text
from services.controller.api.keys import read_keys
from services.controller.platforms.local.directory import StaticDirectory
from services.reward.judge.rubrics import load_rubric

DIGEST = "0" * 64
FILES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "job.toml": ('name = "ü"', lambda path: read_extended(path, "a job")),
    "job.json": ('{"name": "ü"}', lambda path: read_table(path, "a job")),
    "job.yaml": ("name: ü", lambda path: read_table(path, "a job")),
    "keys.toml": (f'[lena]\nsha256 = "{DIGEST}"\nmay = "look"\n# ü', read_keys),
    "rubric.toml": (
        'question = "{prompt}: ü? {image}"\nscale = "0-10"',
        lambda path: load_rubric(str(path)),
    ),
    "plain": ("ü", read_text),
}


@pytest.mark.parametrize("name", FILES)
def test_a_byte_order_mark_changes_nothing_and_other_encodings_are_named(name: str, tmp_path: Path) -> None:
    text, read = FILES[name]
    path = tmp_path / name
    path.write_bytes(text.encode())
    plain = read(path)
    path.write_bytes(text.encode("utf-8-sig"))
    assert read(path) == plain
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        path.write_bytes(text.encode(encoding))
        with pytest.raises(ValueError, match=rf"{name}: the file is UTF-16 or no text: save it as UTF-8"):
            read(path)
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{name}: line \d is not UTF-8: save the file as UTF-8"):
        read(path)


def test_a_file_of_rewards_may_have_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "rewards.toml").write_bytes('ocr = "127.0.0.1:7001"'.encode("utf-8-sig"))
    assert StaticDirectory({}, tmp_path / "rewards.toml").rewards == {"ocr": ("127.0.0.1:7001",)}
