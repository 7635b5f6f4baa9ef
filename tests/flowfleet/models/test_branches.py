"""Both branches of guidance in one forward, as accelerators run small ones, against two forwards."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flowfleet.models import branches
from flowfleet.models.base import ModelAdapter
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.families.qwen_image import QwenImageAdapter
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Guidance, Size
from flowfleet.quantization import fused
from services.trainer.parallel.blocks import compile_blocks
from tests.flowfleet.quantization.test_adapted import made
from tests.tiny_models import make_tiny

KINDS = ("qwen_image", "stable_diffusion_3", "flux", "chroma", "z_image", "wan", "bagel")
ONE_WIDTH = {"stable_diffusion_3", "flux", "chroma"}
"""Families whose prompts all have one width."""
PROMPTS = ["a red sign that says nothing at all"] * 2
SAME_WIDTH, NARROW = "a blue sign that says nothing at all", "a"


@pytest.fixture(params=KINDS)
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> ModelAdapter:
    checkpoint = make_tiny(request.param, tmp_path / request.param)
    return adapter_for(checkpoint).load(checkpoint, dtype=torch.float32)


def guided(adapter: ModelAdapter, negative: str, size: Size) -> tuple[Tensor, list[Tensor | None]]:
    """A velocity at guidance 4, and the gradient of its square by each parameter."""
    adapter.transformer.requires_grad_(True).zero_grad()
    velocity = adapter.velocity(
        adapter.initial_latents([1, 2], size),
        torch.tensor([700.0, 400.0]),
        adapter.encode(PROMPTS),
        size=size,
        guidance=Guidance(4.0),
        negative=adapter.encode([negative]),
    )
    velocity.square().sum().backward()  # type: ignore[no-untyped-call]
    return velocity.detach(), [parameter.grad for parameter in adapter.transformer.parameters()]


def size_of(adapter: ModelAdapter) -> Size:
    return Size(64, 64, 5 if "Wan" in type(adapter).__name__ else 1)


def forwards_of(module: nn.Module) -> list[str]:
    """Grows by one at each forward."""
    forwards: list[str] = []
    module.register_forward_pre_hook(lambda *_: forwards.append("a forward"))
    return forwards


@pytest.mark.parametrize("negative", [SAME_WIDTH, NARROW])
def test_one_forward_gives_what_two_give(
    adapter: ModelAdapter, negative: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    size, forwards = size_of(adapter), forwards_of(adapter.transformer)
    velocity, gradients = guided(adapter, negative, size)
    assert len(forwards) == 2
    monkeypatch.setattr(branches, "are_small", lambda latents: True)
    together, gradients_together = guided(adapter, negative, size)
    kind = request.node.callspec.params["adapter"]
    fits = negative == SAME_WIDTH or kind in ONE_WIDTH or adapter.cuts_padding
    assert len(forwards) == (3 if fits else 4)
    torch.testing.assert_close(together, velocity, rtol=0, atol=2e-5)
    for ours, theirs in zip(gradients_together, gradients, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5 + 1e-4 * float(theirs.abs().max()))


def test_prompts_of_several_widths_go_in_two_forwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = QwenImageAdapter.load(make_tiny("qwen_image", tmp_path / "model"), dtype=torch.float32)
    monkeypatch.setattr(branches, "are_small", lambda latents: True)
    prompts, negative = adapter.encode([PROMPTS[0], "a"]), adapter.encode([NARROW])
    assert branches.stacked(prompts, negative.rows(2), widths_may_differ=True) is None
    forwards = forwards_of(adapter.transformer)
    latents, size = adapter.initial_latents([1, 2], Size(64, 64)), Size(64, 64)
    adapter.velocity(latents, torch.tensor(500.0), prompts, size=size, guidance=Guidance(4.0), negative=negative)
    assert len(forwards) == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_a_float8_base_with_its_kernels_gives_the_same(
    compiled: bool, tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formulas of the kernels, which CUDA has in their place; rows are quantized each by itself, so padding does
    not change the others."""
    adapter = made(tiny_qwen_image, "fp8")
    monkeypatch.setattr(fused, "is_on", lambda device: True)
    size = Size(64, 64)
    latents, prompts, negative = adapter.initial_latents([1, 2], size), blank(adapter, 9), blank(adapter, 3)

    def velocity() -> Tensor:
        with torch.no_grad():
            return adapter.velocity(
                latents, torch.tensor(500.0), prompts, size=size, guidance=Guidance(4.0), negative=negative
            )

    expected = velocity()
    if compiled:
        compile_blocks(adapter.transformer, "aot_eager")
    monkeypatch.setattr(branches, "are_small", lambda latents: True)
    forwards = forwards_of(adapter.transformer)
    assert torch.equal(velocity(), expected)
    assert len(forwards) == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def blank(adapter: ModelAdapter, num_tokens: int) -> PromptEmbeds:
    """Two prompts of random vectors."""
    prompts = adapter.blank_prompts(2, num_tokens)
    prompts.embeds.normal_(generator=torch.Generator().manual_seed(num_tokens))
    return prompts


def test_large_branches_and_those_on_the_cpu_are_not_small() -> None:
    assert not branches.are_small(torch.empty(1, 4))
    assert branches.are_small(torch.empty(7, 1024, 64, device="meta"))
    assert not branches.are_small(torch.empty(8, 1024, 64, device="meta"))
