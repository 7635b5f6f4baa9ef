"""The publishing bench on the CPU, with real trainer ranks and receivers over Gloo."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.performance import figures_in

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.long


def run(*flags: str) -> list[str]:
    command = [sys.executable, "-m", "bench.speed.publish", "--tiny", *flags]
    return subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=500
    ).stdout.splitlines()


@pytest.mark.parametrize(("ranks", "receivers", "modes"), [("2", "1", ["full"]), ("1", "3", ["full", "lora"])])
def test_every_receiver_verifies(ranks: str, receivers: str, modes: list[str]) -> None:
    flags = ["--ranks", ranks, "--receivers", receivers, "--rounds", "2", "--bucket-bytes", "30000"]
    rows = figures_in(run(*flags, "--modes", *modes))
    names = {"full": "tiny Qwen-Image, full", "lora": "tiny Qwen-Image, LoRA r64"}
    assert [row["model"] for row in rows] == [names[mode] for mode in modes]
    for row in rows:
        assert (row["trainer ranks"], row["receivers"]) == (ranks, receivers)
        assert float(row["GB"]) > 0
        assert 0 < float(row["sender s"]) <= float(row["verified s"])


@pytest.mark.parametrize(("receivers", "mode"), [("1", "lora"), ("3", "full")])
def test_the_self_check_kills_a_receiver_and_the_others_verify(receivers: str, mode: str) -> None:
    printed = run("--self-check", "--receivers", receivers, "--modes", mode, "--bucket-bytes", "30000")
    hashes, killed = printed[:2]
    assert "equal those of the CPU" in hashes
    assert killed.startswith(f"receiver 0 of {receivers} killed in a broadcast: UNAVAILABLE")
    (row,) = figures_in(printed)
    assert row["receivers"] == receivers
    assert 0 <= float(row["sender free s"]) < float(row["verified again s"])
