"""Experts in float8: products against float64, torch's grouped kernel by its contract, and HunyuanImage-3.0 on them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowfleet.models.families.hunyuan_image3.adapter import HunyuanImage3Adapter
from flowfleet.models.settings import Size
from flowfleet.planning.live import LiveBytes
from flowfleet.proto.rollout_pb2 import ModelSpec
from flowfleet.quantization import layers
from flowfleet.quantization.experts import ExpertWeights, grouped_product, replace
from flowfleet.quantization.rows import FP8
from services.rollout.engines.acceleration import accelerate, blocks
from services.rollout.engines.loading import load_by_blocks
from services.trainer.sampling.engine import share
from tests.tiny_models import make_tiny

COUNT, INNER, OUTER = 4, 64, 96
ENDS = (5, 5, 20, 32)
"""The second expert has no rows."""


class Matrices(ExpertWeights):
    def __init__(self) -> None:
        super().__init__()
        sizes = torch.logspace(-2, 2, OUTER)[None, :, None]
        self.weight = torch.nn.Parameter((random(COUNT, OUTER, INNER, seed=1) * sizes).bfloat16(), requires_grad=False)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_products_and_gradients_are_those_of_the_rounded_matrices() -> None:
    module, ends = Matrices(), torch.tensor(ENDS, dtype=torch.int32)
    plain = module.weight.double()
    replace(module, "weight")
    exact = module.weight.double() * module.weight_scale.double().unsqueeze(-1)  # type: ignore[operator]
    assert ((exact - plain).abs() <= plain.abs().amax(2, keepdim=True) / 16).all()
    rows, grad = random(ENDS[-1], INNER, seed=2).bfloat16().requires_grad_(), random(ENDS[-1], OUTER, seed=3).bfloat16()
    out = module.grouped("weight", rows, ends)
    torch.autograd.backward(out, grad)
    owner = [sum(end <= row for end in ENDS) for row in range(ENDS[-1])]
    product = torch.stack([exact[expert] @ row for expert, row in zip(owner, rows.detach().double(), strict=True)])
    back = torch.stack([row @ exact[expert] for expert, row in zip(owner, grad.double(), strict=True)])
    assert rows.grad is not None
    for seen, wanted in ((out.detach(), product), (rows.grad, back)):
        assert float(torch.nn.functional.cosine_similarity(seen.double().flatten(), wanted.flatten(), dim=0)) > 0.998
        assert float(seen.double().norm() / wanted.norm()) == pytest.approx(1, abs=0.01)


def test_the_grouped_kernel_takes_what_it_is_given() -> None:
    """Passes the checks of torch's own meta kernel: shapes, layouts, dtypes of matrices and scales."""

    def meta(*shape: int, dtype: torch.dtype = FP8) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    scales = meta(32, 1, dtype=torch.float32), meta(COUNT, OUTER, dtype=torch.float32)
    ends = meta(COUNT, dtype=torch.int32)
    out = grouped_product(meta(32, INNER), scales[0], meta(COUNT, OUTER, INNER), scales[1], ends, torch.bfloat16)
    assert (tuple(out.shape), out.dtype) == ((32, OUTER), torch.bfloat16)


def test_a_replica_is_loaded_by_blocks_with_less_memory_and_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its velocities are near those of the weights that were rounded; some tokens change experts."""
    monkeypatch.setattr(layers, "MIN_SIZE", 16)
    path, size = make_tiny("hunyuan_image3", tmp_path / "model"), Size(64, 64)
    plain = HunyuanImage3Adapter.load(path, dtype=torch.bfloat16)
    spec, bytes_of = ModelSpec(path=str(path), dtype="bfloat16", quantization="fp8_base"), []
    with LiveBytes() as live:
        found = load_by_blocks(HunyuanImage3Adapter, spec, torch.device("cpu"))
    bytes_of.append(live.peak)
    with LiveBytes() as live:
        whole = HunyuanImage3Adapter.load(path, dtype=torch.bfloat16)
        layers.replace_weights(blocks(whole.transformer).values())
    bytes_of.append(live.peak)
    accelerate(found.experts, compile=False, quantization="fp8_base")  # as the engine does next: nothing is left
    expected, seen = whole.transformer.state_dict(), found.transformer.state_dict()
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in seen)
    experts = [name for name, tensor in seen.items() if tensor.dtype == FP8 and ".experts." in name]
    assert len(experts) == 2 * len(plain.transformer.model.layers)
    prompts, latents = plain.encode(["a red sign"]), plain.initial_latents([1], size)
    with torch.no_grad():
        velocities = [one.velocity(latents, torch.tensor(700.0), prompts, size=size) for one in (plain, whole, found)]
    assert torch.equal(velocities[1], velocities[2])
    assert float((velocities[0] - velocities[1]).norm() / velocities[0].norm()) < 0.2
    assert bytes_of[0] < bytes_of[1]

    bare = HunyuanImage3Adapter.load(path, dtype=torch.bfloat16, components=("transformer",), load_format="empty")
    share(found.transformer, bare.transformer)  # as a trainer's rank that samples
    shared = bare.transformer.state_dict()
    assert all(shared[name].data_ptr() == tensor.data_ptr() for name, tensor in found.transformer.state_dict().items())
    found.pipeline.transformer = bare.transformer
    with torch.no_grad():
        assert torch.equal(found.velocity(latents, torch.tensor(700.0), prompts, size=size), velocities[1])
