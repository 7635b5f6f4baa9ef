"""Decoding where memory does not suffice: fewer rows at a time, then tiles."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowfleet.models.base import ModelAdapter
from flowfleet.models.registry import family_of
from flowfleet.models.settings import Size
from tests.tiny_models.stable_diffusion_3 import make_tiny_stable_diffusion_3

SIZE = Size(64, 64)


@pytest.fixture(params=["qwen_image", "stable_diffusion_3"], scope="module")
def adapter(request: pytest.FixtureRequest, tiny_qwen_image: Path, tmp_path_factory: Any) -> ModelAdapter:
    folder = tiny_qwen_image
    if request.param == "stable_diffusion_3":
        folder = make_tiny_stable_diffusion_3(tmp_path_factory.mktemp("sd3"), t5=False)
    loaded: ModelAdapter = family_of(folder).load().load(folder, dtype=torch.float32)
    return loaded


def short_of_memory(decode: Callable[..., Any], most: Callable[[], int], seen: list[int]) -> Callable[..., Any]:
    def limited(latents: torch.Tensor, size: Size) -> torch.Tensor:
        if len(latents) > most():
            raise torch.OutOfMemoryError
        seen.append(len(latents))
        made: torch.Tensor = decode(latents, size)
        return made

    return limited


def test_fewer_rows_then_tiles(adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    latents, seen = adapter.initial_latents(range(5), SIZE), list[int]()
    whole, decode = adapter.decode(latents, SIZE), adapter._decode
    monkeypatch.setattr(adapter, "_decode", short_of_memory(decode, lambda: 2, seen))
    assert (adapter.decode(latents, SIZE).int() - whole.int()).abs().max() <= 1
    assert seen == [2, 2, 1]

    monkeypatch.setattr(adapter, "_decode", short_of_memory(decode, lambda: int(adapter.vae.use_tiling), seen))
    tiled = adapter.decode(latents, SIZE)  # one tile is as large as these
    assert adapter.vae.use_tiling
    assert (tiled.int() - whole.int()).abs().max() <= 1
    monkeypatch.setattr(adapter, "_decode", short_of_memory(decode, lambda: 0, seen))
    with pytest.raises(torch.OutOfMemoryError):
        adapter.decode(latents, SIZE)
