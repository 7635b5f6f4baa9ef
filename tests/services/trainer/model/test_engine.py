"""What an engine tells its adapter."""

from pathlib import Path
from typing import Any

import pytest

from services.trainer.model.engine import Engine
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
