"""The reward in twenty lines as docs/rewards.md tells it: quoted as it is, and a service that keeps the contract."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from docs.generate.markdown import outdated
from examples import quotes
from flowfleet.cli import main as cli

ROOT = Path(__file__).parents[2]
PAGE = ROOT / quotes.REWARDS_PAGE
PROGRAM = ROOT / "examples/reward-python/colourful.py"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("colourful")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, PROGRAM, "--port-file", folder / "port"], stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "port").exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "the service did not start"
            time.sleep(0.05)
        yield (folder / "port").read_text()
    finally:
        process.terminate()
        code = process.wait(30)
    assert code == 0, "SIGTERM drains"


def test_the_page_quotes_it_as_it_is_and_it_is_short() -> None:
    assert outdated(PAGE, quotes.parts(ROOT, quotes.REWARDS_PAGE)) == [], "run `make docs`"
    assert len(PROGRAM.read_text().strip().splitlines()) < 30


def test_it_keeps_the_contract_as_the_command_line_tells(address: str) -> None:
    result = CliRunner().invoke(cli.app, ["check-reward", f"grpc://{address}", "--allowed", "30"])
    assert result.exit_code == 0, result.output
    assert "colourful 1, pictures, scores 0 to 400, at most 64 a call, contract 1" in result.stdout
    assert re.search(r"\d\d passed, \d skipped, in", result.stdout), "nothing failed, nothing was noted"
    skipped = [line for line in result.stdout.splitlines() if line.startswith("skip ")]
    assert all("gives_gradient is not set" in line for line in skipped), "skipped is only what it does not offer"


def test_colour_is_what_it_scores(address: str, tmp_path: Path) -> None:
    """One flat color has spread 0 and the mean of the formula: |(R - G, (R + G) / 2 - B)|."""
    Image.new("RGB", (16, 16), (200, 80, 20)).save(tmp_path / "orange.png")
    expected = 0.3 * (120**2 + 120**2) ** 0.5
    words = ["check-reward", f"grpc://{address}", "--image", str(tmp_path / "orange.png"), "--json"]
    result = CliRunner().invoke(cli.app, words)
    assert f'"score {expected:g}"' in result.stdout


def test_a_broken_contract_is_exit_code_1() -> None:
    result = CliRunner().invoke(cli.app, ["check-reward", "grpc://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "UNAVAILABLE" in result.stdout
    assert "needs 'reachable', which did not pass" in result.stdout
