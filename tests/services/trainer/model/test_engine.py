"""What an engine tells its adapter."""

from pathlib import Path
from typing import Any

import pytest

from flowfleet.local.devices import DEVICES_FILE, Devices
from flowfleet.process.service import STATE_DIR, THREADS
from services.trainer.model.engine import Engine, num_threads
from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.steps import make_spec


@pytest.mark.parametrize(
    ("trainer", "joins"),
    [({"deterministic": False}, True), ({}, False), ({"deterministic": False, "mode": "full"}, False)],
)
def test_branches_of_guidance_are_joined_where_ranks_are_independent_and_bits_do_not_count(
    trainer: dict[str, Any], joins: bool, tiny_qwen_image: Path, ranks: Ranks
) -> None:
    """Full training shares its weights, and every forward then gathers them on all ranks."""
    engine = Engine(make_spec(tiny_qwen_image, trainer=trainer), ranks)
    assert not engine.adapter.joins_branches
    engine.shard()
    assert engine.adapter.joins_branches is joins
    assert engine.adapter.skips_branches  # on a rank alone


def test_ranks_share_out_the_cpus_among_those_that_run_and_deterministic_jobs_have_a_fixed_share(
    tiny_qwen_image: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def threads(**trainer: Any) -> int:
        return num_threads(make_spec(tiny_qwen_image, trainer={"threads": None, **trainer}), ranks)

    monkeypatch.setattr("services.trainer.model.engine.usable_cpus", lambda: 8)
    monkeypatch.setenv(THREADS, "2")  # of four places
    assert threads(deterministic=False) == 2
    monkeypatch.setenv(STATE_DIR, str(tmp_path))
    assert threads(deterministic=False) == 2
    table = Devices(tmp_path / DEVICES_FILE, "0123")
    for count, job_id in enumerate("abcd", 1):
        table.take(job_id, 1)
        assert (threads(deterministic=False), threads()) == (8 // count, 2)
    assert threads(deterministic=False, threads=3) == threads(threads=3) == 3
    for job_id in "abc":
        table.leave(job_id)
    assert threads(deterministic=False) == 8
