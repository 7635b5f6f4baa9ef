"""Float8 linears and compiled blocks: numbers against float64, and what stays as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel
from torch import Tensor, nn

from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.registry import adapter_for
from flowfleet.quantization.layers import MIN_SIZE, Fp8Linear, add_copies
from flowfleet.quantization.products import fp8_linear
from flowfleet.quantization.rows import quantize_rows
from flowfleet.weights import lora, weights
from services.rollout.engines import acceleration
from services.rollout.engines.acceleration import accelerate, blocks, compile_blocks
from tests.services.rollout.conftest import LORA, SIZE

HALF_STEP = 2.0**-4
"""Largest relative rounding error of a normal e4m3 number, which has 3 bits after the leading one."""
SMALLEST = 2.0**-9
"""e4m3's smallest number, of which smaller values are a multiple."""


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantize(experts: Any, *, min_size: int = MIN_SIZE) -> int:
    return sum(add_copies(blocks(expert).values(), min_size=min_size) for expert in experts.values())


def test_rows_are_rounded_to_float8_by_their_own_scale() -> None:
    x = random(6, 64) * torch.tensor([1e-4, 1.0, 1e4, 1.0, 1e-30, 1.0], dtype=torch.bfloat16)[:, None]
    x[3] = 0
    quantized, scale = quantize_rows(x)
    assert quantized.dtype == torch.float8_e4m3fn
    assert scale.shape == (6, 1)
    exact = x.double().abs().amax(1) / 448
    torch.testing.assert_close(scale[:, 0].double()[[0, 1, 2, 4, 5]], exact[[0, 1, 2, 4, 5]], rtol=1e-6, atol=0)
    error = (quantized.double() * scale.double() - x.double()).abs()
    bound = (x.double().abs() * HALF_STEP).maximum(scale.double() * SMALLEST / 2) * (1 + 1e-5)
    assert bool((error <= bound).all())
    assert bool((quantized[3].float() == 0).all())
    assert quantized.float().abs().amax(1)[[0, 1, 2, 4, 5]].tolist() == [448] * 5


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_product_is_that_of_the_rounded_matrices(has_bias: bool) -> None:
    x, weight = random(2, 3, 64), random(48, 64, seed=1)
    bias = random(48, seed=2) if has_bias else None
    w, w_scale = quantize_rows(weight)
    product = fp8_linear(x, w, w_scale.t().contiguous(), bias)
    assert product.shape == (2, 3, 48)
    assert product.dtype == torch.bfloat16
    rows, scale = quantize_rows(x.reshape(-1, 64))
    exact = (rows.double() * scale.double()) @ (w.double() * w_scale.double()).t()
    if bias is not None:
        exact += bias.double()
    torch.testing.assert_close(product.reshape(-1, 48).double(), exact, rtol=2**-7, atol=0.02)
    wanted = x.double().reshape(-1, 64) @ weight.double().t() + (0 if bias is None else bias.double())
    assert float((exact - wanted).norm() / wanted.norm()) < HALF_STEP


def test_the_large_linears_of_the_real_qwen_image_are_its_720() -> None:
    with torch.device("meta"):
        expert: Any = QwenImageTransformer2DModel(num_layers=60)
    assert quantize({"transformer": expert}) == 720
    names = {name for name, module in expert.transformer_blocks[0].named_modules() if isinstance(module, Fp8Linear)}
    attention = {"to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
    mlp = {f"{stream}_mlp.net.{place}" for stream in ("img", "txt") for place in ("0.proj", "2")}
    assert names == {f"attn.{name}" for name in attention} | mlp


def test_modulation_and_what_lies_outside_the_blocks_stay() -> None:
    with torch.device("meta"):
        expert: Any = FluxTransformer2DModel(num_layers=1, num_single_layers=1)
    quantize({"transformer": expert})
    left = {
        name
        for name, module in expert.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, Fp8Linear)
    }
    assert {"x_embedder", "context_embedder", "proj_out", "norm_out.linear"} <= left
    assert {
        "transformer_blocks.0.norm1.linear",
        "transformer_blocks.0.norm1_context.linear",
        "single_transformer_blocks.0.norm.linear",
    } <= left
    assert isinstance(expert.single_transformer_blocks[0].proj_out, Fp8Linear)


def test_parameters_adapters_and_updates_are_what_they_were(tiny_qwen_image: Path) -> None:
    adapter = adapter_for(tiny_qwen_image).load(tiny_qwen_image, dtype=torch.bfloat16, components=("transformer",))
    experts = adapter.experts
    before = {name: value.clone() for name, value in weights.full_parameters(experts).items()}
    assert quantize(experts, min_size=32) > 0
    after = weights.full_parameters(experts)
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)

    lora.install_lora(experts, LORA)
    state = {name: torch.ones_like(value) for name, value in lora.named_adapter_parameters(experts).items()}
    assert len(lora.load_adapter(experts, state)) > 0
    wrapped = [m for m in adapter.transformer.modules() if isinstance(getattr(m, "base_layer", None), Fp8Linear)]
    assert len(wrapped) == len(state) // 2
    lora.remove_lora(experts)

    linear = next(module for module in adapter.transformer.modules() if isinstance(module, Fp8Linear))
    linear.weight.data.mul_(3).add_(0.01)
    stale = linear.fp8_scale.clone()
    acceleration.refresh(experts)
    expected, scale = quantize_rows(linear.weight)
    assert torch.equal(linear.fp8_weight.float(), expected.float())
    assert torch.equal(linear.fp8_scale, scale.t())
    assert not torch.equal(linear.fp8_scale, stale)


def test_a_quantized_transformer_still_says_about_the_same(tiny_qwen_image: Path) -> None:
    adapter = adapter_for(tiny_qwen_image).load(tiny_qwen_image, dtype=torch.bfloat16)
    prompts, latents = adapter.encode(["a sign"]), adapter.initial_latents([1, 2], SIZE)

    def velocity() -> Tensor:
        return adapter.velocity(latents, torch.tensor(700.0), prompts, size=SIZE)

    exact = velocity()
    quantize(adapter.experts, min_size=16)
    rounded = velocity()
    error = float((rounded - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.1


class _Method:
    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise AssertionError("the product in bfloat16 was asked for")


class _Layer(nn.Module):
    """What vLLM's linear layers have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(48, 32))
        self.quant_method = _Method()

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x, None)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = _Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.to_qkv(x)


class _Expert(nn.Module):
    _no_split_modules = ("_Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


def test_layers_that_multiply_by_a_quant_method() -> None:
    expert, x = _Expert(), random(4, 32, seed=3)
    linear = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
    linear.weight.data.copy_(expert.blocks[0].to_qkv.weight)  # type: ignore[union-attr, arg-type]
    assert quantize({"transformer": expert}, min_size=16) == 1
    w, scale = quantize_rows(linear.weight)
    assert torch.equal(expert(x), fp8_linear(x, w, scale.t().contiguous(), None))
    assert list(dict(expert.named_parameters())) == ["blocks.0.to_qkv.weight"]


def test_the_cpu_has_no_float8_kernels() -> None:
    with pytest.raises(ValueError, match=r"rollout.quantization = 'fp8' needs .* cpu"):
        accelerate({"transformer": _Expert()}, compile=False, quantization="fp8")


def test_an_unknown_quantization_and_a_model_without_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="give one of none, fp8, fp8_base"):
        accelerate({"transformer": _Expert()}, compile=False, quantization="int4")
    with pytest.raises(ValueError, match="Linear does not name its blocks"):
        accelerate({"transformer": nn.Linear(2, 2)}, compile=True, quantization="none")


def test_compiled_blocks_say_the_same_and_new_sizes_soon_need_no_new_code(tiny_qwen_image: Path) -> None:
    adapter = adapter_for(tiny_qwen_image).load(tiny_qwen_image, dtype=torch.float32)
    prompts = [adapter.encode(["a sign" + " and a wall" * number]) for number in range(4)]
    latents = adapter.initial_latents([1, 2, 3, 4], SIZE)
    seen = [(2, prompts[0]), (2, prompts[1]), (3, prompts[1])]
    new = [(2, prompts[3]), (3, prompts[0]), (4, prompts[2])]

    @torch.no_grad()
    def velocities(shapes: list[tuple[int, PromptEmbeds]]) -> list[Tensor]:
        timestep = torch.tensor(700.0)
        return [adapter.velocity(latents[:count], timestep, prompt, size=SIZE) for count, prompt in shapes]

    def num_graphs() -> int:
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    exact = velocities(seen), velocities(new)
    lora.install_lora(adapter.experts, LORA)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(adapter.experts, backend="aot_eager")
    torch.testing.assert_close(velocities(seen), exact[0], rtol=1e-4, atol=1e-5)
    compiled = num_graphs()
    assert compiled > 0
    torch.testing.assert_close(velocities(new), exact[1], rtol=1e-4, atol=1e-5)
    assert num_graphs() == compiled
    assert not torch._dynamo.utils.counters["graph_break"]
