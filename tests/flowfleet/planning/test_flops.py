"""Counted FLOPs against the formula of the architecture, and the extrapolation against a count of every block."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flowfleet.job.spec import JobSpec
from flowfleet.models.settings import Size
from flowfleet.planning.flops import ModelFlops, flops_of, model_flops
from flowfleet.planning.skeleton import META, load_skeleton
from recipes.full_size.make_model import write_checkpoint

WIDTH, LAYERS, RANK = 3072, 60, 64


def base_formula(num_text_tokens: int) -> float:
    """FLOPs of Qwen-Image at 512², 1024 image tokens: 2·L·12d²(img + txt) + 2·L·12d² + 4·L·H·dh·(img + txt)²."""
    tokens = 1024 + num_text_tokens
    return 2 * LAYERS * 12 * WIDTH**2 * (tokens + 1) + 4 * LAYERS * WIDTH * tokens**2


def adapter_formula(num_text_tokens: int) -> float:
    """A and B of twelve linears a block: four of d x d, and an MLP of d x 4d and back, on each stream."""
    return 2 * LAYERS * RANK * (1024 + num_text_tokens) * (4 * 2 * WIDTH + 2 * 5 * WIDTH)


@pytest.fixture(scope="module")
def counted(full_size: Path) -> ModelFlops:
    return model_flops(make_spec(full_size, "lora"))


def make_spec(path: Path, mode: str) -> JobSpec:
    part = {"mode": mode, "lora": {"rank": RANK}}
    return JobSpec.model_validate(
        {"model": {"path": str(path)}, "data": {"train": "x"}, "rewards": {"ocr": {}}, "trainer": part}
    )


@pytest.mark.parametrize("num_text_tokens", [40, 128, 333])
def test_qwen_image_has_the_flops_of_its_formula(counted: ModelFlops, num_text_tokens: int) -> None:
    base, adapter = base_formula(num_text_tokens), adapter_formula(num_text_tokens)

    assert counted.base.at(num_text_tokens) == pytest.approx(base, rel=0.01)
    assert counted.sampling(num_text_tokens) == pytest.approx(base + adapter, rel=0.01)
    assert counted.training(num_text_tokens) == pytest.approx(2 * base + 3 * adapter, rel=0.01)


def test_full_fine_tuning_is_three_forwards(tiny_qwen_image: Path) -> None:
    counted = model_flops(make_spec(tiny_qwen_image, "full"))

    assert counted.training(50) == 3 * counted.sampling(50) > 0


def test_three_blocks_stand_for_all(tmp_path: Path, job: Callable[..., JobSpec]) -> None:
    path = write_checkpoint(tmp_path, num_layers=7, tiny=True)
    spec = job(path, trainer={"mode": "full"}, rollout={"height": 64, "width": 64})
    whole = load_skeleton(path, torch.bfloat16)
    size = Size(64, 64)
    latents, prompts = torch.empty(1, *whole.latent_shape(size), device=META), whole.blank_prompts(1, 77)

    each = flops_of(lambda: whole.velocity(latents, torch.tensor(1000.0), prompts, size=size))

    assert model_flops(spec).base.at(77) == pytest.approx(each, rel=1e-9)
