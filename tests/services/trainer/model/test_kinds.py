"""What a trainer asks of a model before it loads it."""

from pathlib import Path

import pytest
import torch

from flowfleet.models.registry import adapter_for
from services.trainer.model.kinds import check_held_out
from tests.services.trainer.steps import make_spec
from tests.tiny_models import make_tiny


def test_held_out_samples_that_the_model_cannot_draw_are_told_by_their_setting(tmp_path: Path) -> None:
    path = make_tiny("stable_diffusion_3", tmp_path / "model")
    adapter = adapter_for(path).load(path, dtype=torch.float32, components=("transformer",), load_format="empty")
    check_held_out(
        make_spec(path, data={"train": "t.txt", "validation": "t.txt"}, schedule={"validation_height": 64}), adapter
    )
    with pytest.raises(ValueError, match=r"^schedule\.validation_height and validation_width: .* pixels a side"):
        check_held_out(
            make_spec(path, data={"train": "t.txt", "validation": "t.txt"}, schedule={"validation_height": 4096}),
            adapter,
        )
