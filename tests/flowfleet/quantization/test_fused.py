"""GELU, normalization and modulation that quantize as well: formulas, gradients, kernels, and blocks made of them."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers import transformer_qwenimage
from torch import Tensor
from torch.nn import functional as F

from flowfleet.models.families.qwen_image_block import QwenImageTransformerBlock
from flowfleet.quantization import fused
from flowfleet.quantization.rows import quantize_rows
from flowfleet.weights import lora
from services.rollout.engines.acceleration import blocks
from tests.flowfleet.quantization.test_adapted import made, random, velocity
from tests.services.rollout.conftest import SIZE

OPERATORS: Any = torch.ops.flowfleet


def norm_arguments(*, has_change: bool, dtype: torch.dtype = torch.float64) -> list[Any]:
    x, change, modulation = (
        random(*shape, seed=seed).to(dtype) for seed, shape in enumerate(((2, 5, 16), (2, 5, 16), (2, 48)))
    )
    shift, scale, gate = (part.clone() for part in modulation.chunk(3, dim=-1))
    return [x, gate if has_change else None, change if has_change else None, shift, scale, 1e-6]


@pytest.mark.parametrize("has_change", [False, True])
def test_gradients_are_those_of_the_formulas(has_change: bool) -> None:
    """In float64, against autograd through torch's own operations."""
    x = random(4, 16).double().requires_grad_()
    values, rows = fused.gelu_rows(x)
    assert not rows[0].requires_grad
    grad = random(4, 16, seed=1).double()
    torch.testing.assert_close(
        torch.autograd.grad(values, x, grad)[0],
        torch.autograd.grad(F.gelu(x, approximate="tanh"), x, grad)[0],
        rtol=1e-6,
        atol=1e-6,  # the backward computes in float32
    )
    arguments = norm_arguments(has_change=has_change)
    inputs = [part.requires_grad_() for part in arguments if isinstance(part, Tensor)]
    results = [OPERATORS.norm_rows(*arguments), fused.norm_formula(*arguments)]
    grads = [random(2, 5, 16, seed=seed).double() for seed in (5, 6)]
    kept = slice(0 if has_change else 1, 2)
    found, expected = (torch.autograd.grad(result[kept], inputs, grads[kept]) for result in results)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("has_change", [False, True])
def test_torch_compile_knows_the_operators(has_change: bool) -> None:
    """Schema, fake tensors and autograd's registration, as torch checks them; then one graph with its backward."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")  # the fourth adds up float8 outputs
    torch.library.opcheck(OPERATORS.gelu_rows, (random(4, 32).requires_grad_(),), test_utils=checks)
    arguments = norm_arguments(has_change=has_change, dtype=torch.bfloat16)
    arguments[0].requires_grad_()
    torch.library.opcheck(OPERATORS.norm_rows, tuple(arguments), test_utils=checks)

    def loss(*arguments: Any) -> Tensor:
        total, values, rows, scales = OPERATORS.norm_rows(*arguments)
        inner, (inner_rows, _) = fused.gelu_rows(values)
        return inner.square().sum() + total.sum() + scales.sum() + inner_rows.float().sum() + rows.float().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    found, expected = (torch.autograd.grad(it(*arguments), arguments[0])[0] for it in (compiled, loss))
    assert torch.equal(found, expected)
    assert float(expected.abs().max()) > 0


def test_rows_are_of_the_values_and_the_gate_is_passed_on() -> None:
    x, change, modulation = random(2, 3, 32), random(2, 3, 32, seed=1), random(2, 96, seed=2)
    shift, scale, gate = (part[:, None] for part in modulation.chunk(3, dim=-1))
    values, rows, next_gate = fused.norm_rows(x, modulation, 1e-6)
    assert torch.equal(values, F.layer_norm(x, (32,), eps=1e-6) * (1 + scale) + shift)
    assert torch.equal(next_gate, gate)
    total, again, more, _ = fused.residual_norm_rows(x, gate, change, modulation, 1e-6)
    assert torch.equal(total, x + gate * change)
    assert torch.equal(again, fused.norm_rows(total, modulation, 1e-6)[0])
    for found, of in ((rows, values), (more, again)):
        expected = quantize_rows(of.view(-1, 32))
        assert torch.equal(found[0].float(), expected[0].float())
        assert torch.equal(found[1], expected[1])


def test_a_block_made_of_them_says_what_diffusers_block_says(
    tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: on the CPU the operators are diffusers' own arithmetic. Off, and with other linears, its own forward
    runs."""
    quantized, plain = made(tiny_qwen_image, "fp8"), made(tiny_qwen_image, "plain")
    assert {type(block) for block in blocks(quantized.transformer).values()} == {QwenImageTransformerBlock}
    calls = []
    theirs = transformer_qwenimage.QwenImageTransformerBlock.forward

    def forward(block: Any, *arguments: Any) -> Any:
        calls.append(block)
        return theirs(block, *arguments)

    monkeypatch.setattr(transformer_qwenimage.QwenImageTransformerBlock, "forward", forward)
    expected = velocity(quantized)
    assert len(calls) == len(quantized.transformer.transformer_blocks)
    monkeypatch.setattr(fused, "is_on", lambda device: True)
    calls.clear()
    assert torch.equal(velocity(quantized), expected)
    assert not calls
    velocity(plain)
    assert len(calls) == len(plain.transformer.transformer_blocks)


def test_an_adapter_learns_the_same_in_such_blocks(tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = made(tiny_qwen_image, "fp8")
    parameters = lora.named_adapter_parameters(adapter.experts)
    latents, prompts = adapter.initial_latents([1, 2], SIZE), adapter.encode(["a sign"])
    gradients = []
    for is_on in (False, True):
        monkeypatch.setattr(fused, "is_on", lambda device, is_on=is_on: is_on)
        loss = adapter.velocity(latents, torch.tensor(700.0), prompts, size=SIZE).square().mean()
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        gradients.append(torch.cat([grad.flatten() for grad in found if grad is not None]))
    similar = F.cosine_similarity(gradients[0].double(), gradients[1].double(), dim=0)
    assert float(similar) > 0.995


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: install a CUDA build of torch, or triton alone")
def test_the_kernels_agree_with_the_formulas_in_tritons_interpreter() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.flowfleet.quantization.interpreted"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.stdout.strip() == "all kernels agree", done.stderr[-2000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("has_change", [False, True])
def test_the_kernels_agree_with_the_formulas_on_a_gpu(has_change: bool) -> None:
    x = random(64, 12288).cuda()
    values, rows, scale = OPERATORS.gelu_rows(x)
    torch.testing.assert_close(values, fused.gelu_formula(x)[0], rtol=2**-7, atol=1e-6)
    assert torch.equal(rows.float(), quantize_rows(values)[0].float())
    assert torch.equal(scale, quantize_rows(values)[1])
    arguments = norm_arguments(has_change=has_change, dtype=torch.bfloat16)
    arguments = [part.cuda() if isinstance(part, Tensor) else part for part in arguments]
    total, values, rows, scale = OPERATORS.norm_rows(*arguments)
    doubles: list[Any] = [part.double() if isinstance(part, Tensor) else part for part in arguments]
    exact = fused.norm_formula(*doubles)
    torch.testing.assert_close(values.double(), exact[1], rtol=2**-7, atol=2**-6)
    assert torch.equal(rows.float(), quantize_rows(values.view(-1, 16))[0].float())
    if has_change:
        torch.testing.assert_close(total.double(), exact[0], rtol=2**-8, atol=0)
