"""Both branches of guidance in one forward, as accelerators run small ones, against two forwards."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from flowfleet.models import branches
from flowfleet.models.base import ModelAdapter
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.families.qwen_image import QwenImageAdapter
from flowfleet.models.families.qwen_image_edit import QwenImageEditAdapter
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Guidance, Size
from flowfleet.quantization import fused
from services.trainer.parallel.blocks import checkpoint_blocks, compile_blocks
from tests.flowfleet.quantization.test_adapted import made
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("fresh_compiler")

KINDS = (
    *("qwen_image", "qwen_image_edit", "stable_diffusion_3", "flux", "chroma", "z_image", "wan", "bagel"),
    "hunyuan_image3",
)
ONE_WIDTH = {"stable_diffusion_3", "flux", "chroma"}
"""Families whose prompts all have one width."""
PROMPTS = ["a red sign that says nothing at all"] * 2
SAME_WIDTH, NARROW = "a blue sign that says nothing at all", "a"


@pytest.fixture(params=KINDS)
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> ModelAdapter:
    checkpoint = make_tiny(request.param, tmp_path / request.param)
    loaded = adapter_for(checkpoint).load(checkpoint, dtype=torch.float32)
    loaded.joins_branches = True
    if isinstance(loaded, QwenImageEditAdapter):
        loaded.condition_pixels = 1024  # a million without it
    return loaded


@pytest.fixture
def on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes small branches go together from the call on."""
    return lambda: monkeypatch.setattr(branches, "go_together", lambda latents, prompts: True)


def encoded(adapter: ModelAdapter, texts: list[str]) -> PromptEmbeds:
    """Encodes prompts, with a picture each for a model that edits."""
    if not isinstance(adapter, QwenImageEditAdapter):
        return adapter.encode(texts)
    return adapter.encode(texts, images=[[Image.new("RGB", (64, 64), "red")] for _ in texts])


def guided(
    adapter: ModelAdapter, negative: str, size: Size, interval: tuple[float, float] = (0.0, 1.0)
) -> tuple[Tensor, list[Tensor | None]]:
    """A velocity at guidance 4, and the gradient of its square by each parameter."""
    adapter.transformer.requires_grad_(True).zero_grad()
    velocity = adapter.velocity(
        adapter.initial_latents([1, 2], size),
        torch.tensor([700.0, 400.0]),
        encoded(adapter, PROMPTS),
        size=size,
        guidance=Guidance(4.0, interval=interval),
        negative=encoded(adapter, [negative]),
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
    adapter: ModelAdapter, negative: str, on_an_accelerator: Callable[[], None], request: pytest.FixtureRequest
) -> None:
    size, forwards = size_of(adapter), forwards_of(adapter.transformer)
    expected = guided(adapter, negative, size)
    assert len(forwards) == 2
    on_an_accelerator()
    found = guided(adapter, negative, size)
    kind = request.node.callspec.params["adapter"]
    fits = negative == SAME_WIDTH or kind in ONE_WIDTH or adapter.cuts_padding
    assert len(forwards) == (3 if fits else 4)
    assert_same(found, expected)


def assert_same(found: tuple[Tensor, list[Tensor | None]], expected: tuple[Tensor, list[Tensor | None]]) -> None:
    """Velocities and gradients; one that is missing is zero."""
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2e-5)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=5e-5 + 1e-4 * float(theirs.abs().max()))
        else:
            assert all(part is None or not part.any() for part in (ours, theirs))


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_halves_of_different_widths_are_checkpointed_and_compiled(
    kind: Any, tiny_qwen_image: Path, on_an_accelerator: Callable[[], None]
) -> None:
    """One of the rows lies outside the interval of guidance."""
    adapter = QwenImageAdapter.load(tiny_qwen_image, dtype=torch.float32)
    size, interval = Size(64, 64), (0.0, 0.5)
    expected = guided(adapter, NARROW, size, interval)
    checkpoint_blocks(adapter.transformer, kind, is_compiled=True)
    compile_blocks(adapter.transformer, "aot_eager")
    adapter.joins_branches = True
    on_an_accelerator()
    forwards = forwards_of(adapter.transformer)
    assert_same(guided(adapter, NARROW, size, interval), expected)
    assert len(forwards) == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_prompts_of_several_widths_go_in_two_forwards(
    tiny_qwen_image: Path, on_an_accelerator: Callable[[], None]
) -> None:
    adapter = QwenImageAdapter.load(tiny_qwen_image, dtype=torch.float32)
    adapter.joins_branches = True
    on_an_accelerator()
    prompts, negative = adapter.encode([PROMPTS[0], "a"]), adapter.encode([NARROW])
    assert branches.stacked(prompts, negative.rows(2), widths_may_differ=True) is None
    forwards = forwards_of(adapter.transformer)
    latents, size = adapter.initial_latents([1, 2], Size(64, 64)), Size(64, 64)
    adapter.velocity(latents, torch.tensor(500.0), prompts, size=size, guidance=Guidance(4.0), negative=negative)
    assert len(forwards) == 2


def test_an_adapter_that_was_not_told_to_join_them_does_not(
    tiny_qwen_image: Path, on_an_accelerator: Callable[[], None]
) -> None:
    """Ranks that share a model must run equally many forwards, and their micro-batches may differ in width."""
    adapter = QwenImageAdapter.load(tiny_qwen_image, dtype=torch.float32)
    on_an_accelerator()
    forwards = forwards_of(adapter.transformer)
    guided(adapter, SAME_WIDTH, Size(64, 64))
    assert len(forwards) == 2


def test_a_forward_of_one_branch_has_no_arguments_of_diffusers_alone(tiny_qwen_image: Path) -> None:
    """vLLM-Omni's transformer, which the same adapter runs, does not know `attention_kwargs`."""
    adapter, seen = QwenImageAdapter.load(tiny_qwen_image, dtype=torch.float32), set[str]()
    adapter.transformer.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    guided(adapter, NARROW, Size(64, 64))
    assert "hidden_states" in seen
    assert "attention_kwargs" not in seen


@pytest.mark.parametrize("skips", [True, False])
def test_a_forward_outside_of_the_interval_is_left_out_where_ranks_are_independent(
    skips: bool, tiny_qwen_image: Path
) -> None:
    adapter = QwenImageAdapter.load(tiny_qwen_image, dtype=torch.float32)
    adapter.skips_branches = skips
    forwards = forwards_of(adapter.transformer)
    velocity, _ = guided(adapter, NARROW, Size(64, 64), (0.0, 0.1))
    assert len(forwards) == (1 if skips else 2)
    unguided = adapter.velocity(
        adapter.initial_latents([1, 2], Size(64, 64)),
        torch.tensor([700.0, 400.0]),
        adapter.encode(PROMPTS),
        size=Size(64, 64),
    )
    assert torch.equal(velocity, unguided)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_float8_base_with_its_kernels_gives_the_same(
    is_compiled: bool, tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch, on_an_accelerator: Callable[[], None]
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
    if is_compiled:
        compile_blocks(adapter.transformer, "aot_eager")
    adapter.joins_branches = True
    on_an_accelerator()
    forwards = forwards_of(adapter.transformer)
    assert torch.equal(velocity(), expected)
    assert len(forwards) == 1


def blank(adapter: ModelAdapter, num_tokens: int) -> PromptEmbeds:
    """Two prompts of random vectors."""
    prompts = adapter.blank_prompts(2, num_tokens)
    prompts.embeds.normal_(generator=torch.Generator().manual_seed(num_tokens))
    return prompts


def test_large_branches_and_those_on_the_cpu_go_apart() -> None:
    prompt = PromptEmbeds(torch.empty(1, 2, 4, device="meta"), torch.ones(1, 2, dtype=torch.bool))
    edits = replace(prompt, extras={"image_1": torch.empty(1, 2048, 64, device="meta")})
    assert not branches.go_together(torch.empty(1, 4), prompt)
    assert branches.go_together(torch.empty(7, 1024, 64, device="meta"), prompt)
    assert not branches.go_together(torch.empty(8, 1024, 64, device="meta"), prompt)
    assert not branches.go_together(torch.empty(7, 1024, 64, device="meta"), edits)
