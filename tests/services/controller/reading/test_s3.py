"""Prompts in S3, read by the confined reader from moto's server, in the environment that tests/packages makes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
PYTHON = Path(os.environ.get("FLOWFLEET_STORES", ROOT / ".venv-stores")) / "bin/python"
SIGNS = [["the word CAT", {"word": "cat"}], ["the word DOG", {"word": "dog"}]]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON}: tests/packages makes it")
    command = [str(PYTHON), "-m", "tests.services.controller.reading.s3_process", str(tmp_path_factory.mktemp("s3"))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FLOWFLEET_"))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_prompts_and_tables_are_read_and_what_is_missing_is_never_there(told: dict[str, Any]) -> None:
    signs, table, empty, gone = told["found"]
    assert signs == SIGNS
    assert table == [["x", {"n": "1"}], ["y", {"n": "2"}]]
    assert empty == "never: s3://prompts/a/empty.txt: holds no prompt"
    assert gone.startswith("never: ")
    assert "the store has no object s3://prompts/a/gone.csv" in gone


def test_credentials_are_the_readers_own_and_a_public_bucket_needs_none(told: dict[str, Any]) -> None:
    (without,) = told["without"]
    assert without.startswith("later: ")
    assert "give the controller FLOWFLEET_READER_AWS_ACCESS_KEY_ID" in without
    assert told["public"] == [SIGNS]


def test_a_store_inside_the_network_must_be_listed(told: dict[str, Any]) -> None:
    (inside,) = told["inside"]
    assert "127.0.0.1 is no public address: the controller or `flowfleet up` needs --data-network" in inside


def test_a_users_machine_reads_with_its_own_credentials(told: dict[str, Any]) -> None:
    assert told["own"] == [text for text, _ in SIGNS]
