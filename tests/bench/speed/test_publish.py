"""The publishing bench on the CPU, with real trainer ranks and receivers over Gloo."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.long


def run(*flags: str) -> str:
    command = [sys.executable, "-m", "bench.speed.publish", "--tiny", *flags]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=500).stdout


def test_two_ranks_publish_to_a_receiver() -> None:
    table = run("--ranks", "2", "--modes", "full", "--rounds", "2", "--bucket-bytes", "30000").splitlines()
    assert len(table) == 3
    model, ranks, gigabytes, sender, verified, _ = (cell.strip() for cell in table[-1].strip("|").split("|"))
    assert (model, ranks) == ("tiny Qwen-Image, full", "2")
    assert float(gigabytes) > 0
    assert 0 < float(sender) <= float(verified)


def test_the_self_check_kills_a_receiver_and_goes_on() -> None:
    hashes, killed, again = run("--self-check", "--bucket-bytes", "30000").splitlines()
    assert "equal those of the CPU" in hashes
    assert "receiver killed in a broadcast: sender free" in killed
    assert again.startswith("next group:")
