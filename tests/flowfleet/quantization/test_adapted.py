"""Adapters as rollouts multiply them, against float64 and against PEFT's layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowfleet.models.base import ModelAdapter
from flowfleet.models.registry import adapter_for
from flowfleet.proto.rollout_pb2 import LoraSpec
from flowfleet.quantization.adapted import (
    AdaptedLinear,
    MergedLinear,
    SharingLinear,
    add_adapters,
    put,
    shared_down,
)
from flowfleet.quantization.layers import project, replace_weights
from flowfleet.weights import lora
from services.rollout.engines import acceleration
from services.rollout.engines.acceleration import blocks
from tests.services.rollout.conftest import SIZE

BASES = ["plain", "fp8"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def made(path: Path, base: str, *, std: float = 0.05, dtype: torch.dtype = torch.bfloat16) -> ModelAdapter:
    """A model with an adapter of random factors on all targets."""
    adapter = adapter_for(path).load(path, dtype=dtype)
    if base == "fp8":
        assert replace_weights(blocks(adapter.transformer).values(), min_size=16) > 0
    spec = LoraSpec(rank=4, alpha=6.0, target_modules=adapter.lora_targets)
    generator = torch.Generator().manual_seed(7)
    for parameter in lora.install_lora(adapter.experts, spec).values():
        parameter.data.normal_(std=std, generator=generator)
    return adapter


@torch.no_grad()
def velocity(adapter: ModelAdapter) -> Tensor:
    latents, prompts = adapter.initial_latents([1, 2], SIZE), adapter.encode(["a sign"])
    return adapter.velocity(latents, torch.tensor(700.0), prompts, size=SIZE)


def layers_of(adapter: ModelAdapter, kind: type[nn.Module]) -> list[Any]:
    return [module for module in adapter.transformer.modules() if isinstance(module, kind)]


def test_products_are_added_to_their_columns_alone() -> None:
    output, down = random(2, 3, 40), random(2, 3, 12, seed=1)
    ups = [random(16, 4, seed=2), random(8, 8, seed=3)]
    expected = output.double().clone()
    expected[..., 4:20] += 1.5 * down[..., :4].double() @ ups[0].double().t()
    expected[..., 30:38] += 1.5 * down[..., 4:].double() @ ups[1].double().t()
    torch.library.opcheck(add_adapters, (output.clone(), down, ups, [4, 30], 1.5))
    untouched = output.clone()
    add_adapters(output, down, ups, [4, 30], 1.5)
    torch.testing.assert_close(output.double(), expected, rtol=2**-8, atol=0)
    assert torch.equal(output[..., 20:30], untouched[..., 20:30])


@pytest.mark.parametrize("base", BASES)
def test_one_product_of_several_adapters_says_what_pefts_layers_say(tiny_qwen_image: Path, base: str) -> None:
    dtype, allowed = (torch.float32, 1e-4) if base == "plain" else (torch.bfloat16, 0.1)
    adapter = made(tiny_qwen_image, base, std=0.2, dtype=dtype)
    exact = velocity(adapter)
    acceleration.adapt(adapter.experts, compile=True, merged=False)
    assert len(layers_of(adapter, AdaptedLinear)) == 12 * len(adapter.transformer.transformer_blocks)
    separate = velocity(adapter)
    with lora.adapter_disabled(adapter.experts):
        plain = velocity(adapter)
    change = float((plain - exact).norm())
    assert 0 < float((separate - exact).norm()) < allowed * change

    attention = adapter.transformer.transformer_blocks[0].attn
    linears, x = [attention.to_q, attention.to_k, attention.to_v], random(2, 5, attention.to_q.in_features).to(dtype)
    with torch.no_grad():
        for shared, alone in zip(project(x, linears), [linear(x) for linear in linears], strict=True):
            torch.testing.assert_close(shared, alone, rtol=2**-6, atol=2**-8)
        assert shared_down(x, linears) is not None
        with lora.adapter_disabled(adapter.experts):
            assert shared_down(x, linears) is None
    assert shared_down(x, linears) is None  # with gradients PEFT's layers compute
    lora.remove_lora(adapter.experts)
    assert torch.equal(velocity(adapter), plain)


@pytest.mark.parametrize("base", BASES)
def test_trained_linears_that_share_a_product_have_pefts_outputs_and_gradients(
    tiny_qwen_image: Path, base: str
) -> None:
    dtype, near = (torch.float32, 1e-5) if base == "plain" else (torch.bfloat16, 2e-2)
    adapter = made(tiny_qwen_image, base, std=0.2, dtype=dtype)
    attention = adapter.transformer.transformer_blocks[0].attn
    linears = [attention.to_q, attention.to_k, attention.to_v]
    x = random(2, 5, attention.to_q.in_features).to(dtype).requires_grad_()
    weights = [parameter for linear in linears for parameter in linear.parameters() if parameter.requires_grad]

    def outcome() -> list[Tensor]:
        outputs = project(x, linears)
        loss = sum((part.float() * (place + 1)).square().sum() for place, part in enumerate(outputs))
        return [*outputs, *torch.autograd.grad(loss, [x, *weights])]  # type: ignore[arg-type]

    assert shared_down(x, linears) is None
    expected = outcome()
    put(SharingLinear, adapter.transformer.modules())
    assert len(layers_of(adapter, SharingLinear)) == 12 * len(adapter.transformer.transformer_blocks)
    assert shared_down(x, linears) is not None
    for mine, theirs in zip(outcome(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near * float(theirs.abs().max()))
    with torch.no_grad():
        for mine, theirs in zip(project(x, linears), expected[:3], strict=True):  # and the same without gradient
            torch.testing.assert_close(mine, theirs, rtol=near, atol=near * float(theirs.abs().max()))
    with lora.adapter_disabled(adapter.experts):
        assert shared_down(x, linears) is None


@pytest.mark.long
@pytest.mark.parametrize("base", BASES)
def test_compiled_blocks_add_in_place_without_copying_the_output(tiny_qwen_image: Path, base: str) -> None:
    """What inductor makes of a block, read back: each product's output goes into the operator as it is."""
    from torch._inductor.utils import run_and_get_code

    adapter = made(tiny_qwen_image, base)
    acceleration.adapt(adapter.experts, compile=True, merged=False)
    linear = adapter.transformer.transformer_blocks[0].attn.to_q
    torch._dynamo.reset()
    with torch.no_grad():
        x = random(3, 5, linear.in_features)
        compiled, (code, *_) = run_and_get_code(torch.compile(linear, fullgraph=True), x)
        torch.testing.assert_close(compiled, linear(x), rtol=2**-6, atol=2**-8)
    assert "flowfleet.add_adapters" in code
    assert "cpp_fused_clone" not in code
    assert "auto_functionalized" not in code.replace("auto_functionalized =>", "")


def test_a_merged_adapter_is_its_change_of_the_weight(tiny_qwen_image: Path) -> None:
    adapter = made(tiny_qwen_image, "plain", dtype=torch.float32)
    exact = velocity(adapter)
    acceleration.adapt(adapter.experts, compile=False, merged=True)
    torch.testing.assert_close(velocity(adapter), exact, rtol=1e-4, atol=1e-4)
    for parameter in lora.named_adapter_parameters(adapter.experts).values():
        parameter.data.mul_(2)
    stale = velocity(adapter)
    torch.testing.assert_close(stale, exact, rtol=1e-4, atol=1e-4)
    acceleration.merge(adapter.experts)
    moved = velocity(adapter)
    fresh = made(tiny_qwen_image, "plain", std=0.1, dtype=torch.float32)
    torch.testing.assert_close(moved, velocity(fresh), rtol=1e-4, atol=1e-4)
    with lora.adapter_disabled(adapter.experts), lora.adapter_disabled(fresh.experts):
        assert torch.equal(velocity(adapter), velocity(fresh))


@pytest.mark.parametrize("base", BASES)
def test_rounding_replaces_the_change_of_an_early_merged_adapter(tiny_qwen_image: Path, base: str) -> None:
    """What a weight changes by is at least nine tenths of the adapter's change away from that."""
    adapter = made(tiny_qwen_image, base, std=1e-3)
    acceleration.adapt(adapter.experts, compile=False, merged=True)
    for layer in layers_of(adapter, MergedLinear):
        before = layer.base_layer.weight.double()
        after = layer.merged_weight.double()
        if base == "fp8":
            before, after = before * layer.base_layer.fp8_scale.t(), after * layer.merged_scale.t()
        up, down = layer.lora_B["default"].weight.double(), layer.lora_A["default"].weight.double()
        wanted = layer.scaling["default"] * up @ down
        assert float((after - before - wanted).norm().detach()) > 0.9 * float(wanted.norm().detach()) > 0
