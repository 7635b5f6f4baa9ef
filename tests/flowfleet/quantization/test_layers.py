"""Float8 products with gradients, against float64; a base that is float8 alone."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flowfleet.models.registry import adapter_for
from flowfleet.quantization.layers import (
    Fp8Base,
    add_copies,
    full_precision,
    is_quantized,
    project,
    replace_weights,
    train_in_fp8,
)
from flowfleet.quantization.products import fp8_linear, fp8_trained_linear
from flowfleet.quantization.rows import formula, quantize_rows
from flowfleet.weights import lora
from services.rollout.engines.acceleration import blocks
from tests.services.rollout.conftest import LORA, SIZE


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(value: Tensor | None, exact: Tensor, least: float) -> None:
    """Checks direction (cosine) and length."""
    assert value is not None
    found, exact = value.detach().double(), exact.detach()
    assert float(nn.functional.cosine_similarity(found.flatten(), exact.flatten(), dim=0)) > least
    assert float(found.norm() / exact.norm()) == pytest.approx(1, abs=0.01)


def test_columns_may_have_factors() -> None:
    x, factors = random(5, 48), torch.rand(48) + 0.5
    rows, scale = quantize_rows(x, factors)
    expected, expected_scale = formula(x.float() * factors)
    assert torch.equal(rows.float(), expected.float())
    assert torch.equal(scale, expected_scale)


def test_the_gradient_is_that_of_the_rounded_weights() -> None:
    x, weight = random(32, 64).requires_grad_(), random(96, 64, seed=1) * torch.logspace(-2, 2, 96)[:, None].bfloat16()
    w, scale = quantize_rows(weight)
    out = fp8_linear(x, w, scale.t().contiguous(), None)
    grad = random(32, 96, seed=2)
    torch.autograd.backward(out, grad)
    close(x.grad, grad.double() @ (w.double() * scale.double()), 0.998)


def test_a_trained_product_and_its_gradients_are_those_of_float64() -> None:
    """The output is that of rounded input and weight, the gradient of the input that by the rounded weight. Those of
    weight and bias have no rounding to float8. All are close to those of the plain linear."""
    x, bias = random(64, 128).requires_grad_(), random(96, seed=3).requires_grad_()
    weight = (random(96, 128, seed=1) * torch.logspace(-1, 1, 96)[:, None]).bfloat16().requires_grad_()
    grad = random(64, 96, seed=2)
    out = fp8_trained_linear(x, weight, bias)
    torch.autograd.backward(out, grad)
    (rows, scale), (w, w_scale) = quantize_rows(x.detach()), quantize_rows(weight.detach())
    rounded = w.double() * w_scale.double()
    close(out, (rows.double() * scale.double()) @ rounded.t() + bias.double(), 0.99999)
    close(x.grad, grad.double() @ rounded, 0.998)
    close(weight.grad, grad.double().t() @ x.double(), 0.99999)
    close(bias.grad, grad.double().sum(dim=0), 0.99999)
    close(out, x.double() @ weight.double().t() + bias.double(), 0.995)
    close(x.grad, grad.double() @ weight.double(), 0.995)


@pytest.mark.parametrize("quantize", [replace_weights, train_in_fp8])
def test_linears_of_one_input_share_its_rows_and_say_the_same(quantize: Callable[..., int]) -> None:
    block = nn.ModuleDict({name: nn.Linear(32, 48, dtype=torch.bfloat16) for name in "qkv"})
    x = random(4, 32)
    assert quantize([block], min_size=16) == 3
    linears = list(block.values())
    for shared, alone in zip(project(x, linears), [linear(x) for linear in linears], strict=True):
        assert torch.equal(shared, alone)


def test_an_adapter_learns_on_a_base_that_is_float8_alone(tiny_qwen_image: Path) -> None:
    """The adapter is injected before the weights are replaced (the trainer), or after it (a replica)."""
    outputs = []
    for order in ("inject", "replace"):
        adapter = adapter_for(tiny_qwen_image).load(tiny_qwen_image, dtype=torch.bfloat16)
        expert = adapter.transformer
        prompts = adapter.encode(["a sign"])
        if order == "inject":
            lora.install_lora(adapter.experts, LORA)
        replaced = replace_weights(blocks(expert).values(), min_size=16)
        if order == "replace":
            lora.install_lora(adapter.experts, LORA)
        parameters = lora.named_adapter_parameters(adapter.experts)
        assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}
        for parameter in parameters.values():
            parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(7))
        bases = [module for module in expert.modules() if isinstance(module, Fp8Base)]
        assert len(bases) == replaced > 0
        assert all(base.weight.dtype == torch.float8_e4m3fn for base in bases)
        velocity = adapter.velocity(adapter.initial_latents([1, 2], SIZE), torch.tensor(700.0), prompts, size=SIZE)
        torch.autograd.backward(velocity.square().mean())
        assert all(parameter.grad is not None for parameter in parameters.values())
        outputs.append(velocity.detach())
    assert torch.equal(*outputs)


class VllmMethod:
    """Multiplies as vLLM's linear layers do without quantization."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.weight, bias)  # type: ignore[arg-type]


class VllmLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.quant_method = nn.Parameter(random(48, 32, seed=3)), VllmMethod()

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x)


def test_a_replica_with_copies_computes_in_full_precision_where_it_is_asked_to() -> None:
    """Equals the plain linears bit for bit inside, whatever happens there, and float8 products again afterwards."""
    block = nn.ModuleDict({"plain": nn.Linear(32, 48, dtype=torch.bfloat16), "vllm": VllmLinear()})
    x = random(4, 32)
    exact = [linear(x) for linear in block.values()]
    assert add_copies([block], min_size=16) == 2
    rounded = [linear(x) for linear in block.values()]
    assert not any(torch.equal(one, other) for one, other in zip(exact, rounded, strict=True))
    for _ in range(2):
        with suppress(KeyError), full_precision(block.modules()):
            assert not is_quantized(block["plain"])
            for seen, wanted in zip([linear(x) for linear in block.values()], exact, strict=True):
                assert torch.equal(seen, wanted)
            raise KeyError
        for seen, wanted in zip([linear(x) for linear in block.values()], rounded, strict=True):
            assert torch.equal(seen, wanted)


def test_a_float8_base_has_no_other_precision() -> None:
    block = nn.ModuleDict({"plain": nn.Linear(32, 48, dtype=torch.bfloat16)})
    replace_weights([block], min_size=16)
    x = random(4, 32)
    before = block["plain"](x)
    with full_precision(block.modules()):
        assert torch.equal(block["plain"](x), before)
