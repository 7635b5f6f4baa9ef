"""What blocks keep for the backward, and compiling them: the same numbers as without."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode

from flowfleet.models.base import ModelAdapter
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Size
from flowfleet.models.trainable import blocks_of
from flowfleet.proto.rollout_pb2 import LoraSpec
from flowfleet.quantization.layers import Fp8Trained, train_in_fp8
from flowfleet.weights.lora import install_lora
from services.trainer.parallel import blocks
from services.trainer.parallel.blocks import checkpoint_blocks, compile_blocks

pytestmark = pytest.mark.usefixtures("fresh_compiler")

SIZE = Size(32, 32, 1)


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def adapted(path: Path) -> tuple[ModelAdapter, dict[str, Any]]:
    """Installs a LoRA that is not zero."""
    adapter = adapter_for(path).load(path, dtype=torch.float32, components=("transformer",))
    targets = ("to_q", "to_v", "img_mlp.net.2")
    parameters = install_lora(adapter.experts, LoraSpec(rank=2, alpha=4.0, target_modules=targets))
    for number, parameter in enumerate(parameters.values()):
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(number))
    return adapter, dict(parameters)


def velocity(adapter: ModelAdapter, num_text_tokens: int) -> Tensor:
    prompts = adapter.blank_prompts(2, num_text_tokens)
    prompts.embeds.normal_(generator=torch.Generator().manual_seed(7))
    latents = adapter.initial_latents([1, 2], SIZE)
    return adapter.velocity(latents, torch.tensor(500.0), prompts, size=SIZE)


def gradients(adapter: ModelAdapter, parameters: dict[str, Any], num_text_tokens: int = 5) -> dict[str, Tensor]:
    velocity(adapter, num_text_tokens).square().mean().backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return found


def test_checkpointing_gives_the_same_gradients_bit_for_bit_and_recomputes_what_it_says(
    tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`selective` runs no product or attention again whose inner dimension is large enough."""
    found, counts = {}, {}
    for kind in ("none", "full", "selective"):
        adapter, parameters = adapted(tiny_qwen_image)
        monkeypatch.setattr(blocks, "RECOMPUTED_BELOW", 1)
        if kind != "none":
            checkpoint_blocks(adapter.transformer, kind)  # type: ignore[arg-type]
        with Counting() as counting:
            found[kind] = gradients(adapter, parameters)
        counts[kind] = counting.calls
    for kind in ("full", "selective"):
        for name, gradient in found["none"].items():
            assert torch.equal(found[kind][name], gradient), (kind, name)
    assert all(float(gradient.abs().max()) > 0 for gradient in found["none"].values() if gradient is not None)
    costly = [
        name for name in counts["none"] if name in ("mm", "addmm", "bmm") or name.startswith("_scaled_dot_product")
    ]
    assert any(name.startswith("_scaled_dot_product") for name in costly)
    forward = [name for name in costly if not name.endswith("backward")]
    assert all(counts["selective"][name] == counts["none"][name] for name in forward)
    assert sum(counts["full"][name] for name in forward) > sum(counts["none"][name] for name in forward)
    assert counts["selective"]["native_layer_norm"] == counts["full"]["native_layer_norm"]
    assert counts["full"]["native_layer_norm"] > counts["none"]["native_layer_norm"]


def test_products_of_a_small_inner_dimension_are_made_again(tiny_qwen_image: Path) -> None:
    """All of the tiny model's are; attention is not."""
    counts = {}
    for kind in ("full", "selective"):
        adapter, parameters = adapted(tiny_qwen_image)
        checkpoint_blocks(adapter.transformer, kind)
        with Counting() as counting:
            gradients(adapter, parameters)
        counts[kind] = counting.calls
    attention = next(name for name in counts["full"] if name.startswith("_scaled_dot") and "backward" not in name)
    assert counts["selective"]["addmm"] == counts["full"]["addmm"]
    assert counts["full"][attention] == 2 * counts["selective"][attention]


@pytest.mark.parametrize("kind", ["none", "full", "selective"])
def test_weights_trained_in_float8_have_the_same_gradients_checkpointed_and_compiled(
    kind: Any, tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one graph a block; close to the gradients of plain products. `selective` makes no product again."""
    monkeypatch.setattr(blocks, "RECOMPUTED_BELOW", 1)

    def made(*, fp8: bool, kind: Any = "none") -> tuple[ModelAdapter, dict[str, Any]]:
        adapter = adapter_for(tiny_qwen_image).load(tiny_qwen_image, dtype=torch.bfloat16, components=("transformer",))
        adapter.transformer.requires_grad_(True)
        if fp8:
            assert train_in_fp8(blocks_of(adapter.transformer), min_size=16) > 0
        if kind != "none":
            checkpoint_blocks(adapter.transformer, kind, is_compiled=True)
        return adapter, dict(adapter.transformer.named_parameters())

    def cosine(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        used = [name for name, grad in other.items() if grad is not None]  # compiled, the others' are zero
        first, second = (torch.cat([found[name].flatten().double() for name in used]) for found in (one, other))
        return float(torch.nn.functional.cosine_similarity(first, second, dim=0))

    plain = gradients(*made(fp8=False))
    with Counting() as once:
        expected = gradients(*made(fp8=True))
    assert plain.keys() == expected.keys()
    assert cosine(plain, expected) > 0.995
    adapter, parameters = made(fp8=True, kind=kind)
    with Counting() as counting:
        found = gradients(adapter, parameters)
    for name, gradient in found.items():
        assert gradient is expected[name] is None or torch.equal(gradient, expected[name]), name
    num_products = sum(isinstance(module, Fp8Trained) for module in adapter.transformer.modules())
    again = num_products if kind == "full" else 0
    assert counting.calls["_scaled_mm"] == once.calls["_scaled_mm"] + again > num_products
    compile_blocks(adapter.transformer, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = gradients(adapter, parameters)
    assert torch._dynamo.utils.counters["graph_break"] == {}
    assert cosine(found, expected) > 0.9999


def test_full_checkpointing_keeps_no_float8_product_of_a_compiled_block(tiny_qwen_image: Path) -> None:
    """Its backward makes each of them again, and one more for the gradient of the input."""
    products: list[int] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)
        products.append(len(calls))
        return make_boxed_func(graph.forward)

    adapter = adapter_for(tiny_qwen_image).load(tiny_qwen_image, dtype=torch.bfloat16, components=("transformer",))
    adapter.transformer.requires_grad_(True)
    found = blocks_of(adapter.transformer)
    num_products = train_in_fp8(found, min_size=16) // len(found)
    checkpoint_blocks(adapter.transformer, "full", is_compiled=True)
    backend = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    compile_blocks(adapter.transformer, backend=backend)
    gradients(adapter, dict(adapter.transformer.named_parameters()))
    assert products[:2] == [num_products, 2 * num_products]


@pytest.mark.parametrize("kind", [pytest.param("none", marks=pytest.mark.long), "selective"])
def test_compiled_blocks_give_the_same_and_share_their_code(kind: Any, tiny_qwen_image: Path) -> None:
    """Both blocks, with and without gradient, at three widths of the text: the third compiles nothing new."""
    plain, plain_parameters = adapted(tiny_qwen_image)
    adapter, parameters = adapted(tiny_qwen_image)
    if kind != "none":
        checkpoint_blocks(adapter.transformer, kind)
    compile_blocks(adapter.transformer, backend="aot_eager")
    for width in (5, 7, 9):
        with torch.no_grad():
            torch.testing.assert_close(velocity(adapter, width), velocity(plain, width), rtol=1e-5, atol=1e-5)
        expected = gradients(plain, plain_parameters, width)
        for name, gradient in gradients(adapter, parameters, width).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
        if width == 7:
            graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs > 0
    assert int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == graphs
