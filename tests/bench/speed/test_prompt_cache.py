"""The bench measures what its columns say."""

from __future__ import annotations

from pathlib import Path

import torch

from bench.speed.prompt_cache import measure
from flowfleet.models.registry import adapter_for


def test_a_cached_prompt_is_not_encoded(tiny_qwen_image: Path) -> None:
    adapter = adapter_for(tiny_qwen_image).load(str(tiny_qwen_image), dtype=torch.float32, device=torch.device("cpu"))
    found = measure(adapter, number=8, repeats=3)
    assert found["cached"] < found["alone"]
