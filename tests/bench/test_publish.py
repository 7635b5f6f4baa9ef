"""The publishing bench on the CPU, with real trainer ranks and receivers over Gloo."""

from pathlib import Path

import pytest

from tests.bench.running import run_bench

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("ranks", "receivers", "modes"), [(2, 1, ["full"]), (1, 3, ["full", "lora"])])
def test_every_receiver_verifies(ranks: int, receivers: int, modes: list[str], tmp_path: Path) -> None:
    flags = f"--tiny --ranks {ranks} --receivers {receivers} --rounds 2 --bucket-bytes 30000 --modes {' '.join(modes)}"
    _, rows = run_bench("publish", flags, tmp_path)
    names = {"full": "tiny Qwen-Image, full", "lora": "tiny Qwen-Image, LoRA r64"}
    assert [row["model"] for row in rows] == [names[mode] for mode in modes]
    for row in rows:
        assert (row["trainer_ranks"], row["receivers"]) == (ranks, receivers)
        assert row["gb"] > 0
        assert 0 < row["sender_s"] <= row["verified_s"]
