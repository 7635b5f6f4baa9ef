"""Stable Diffusion 3.5 and Wan through the vLLM-Omni engine, against the diffusers engine on the same tiny models."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from flowfleet.errors import DataLoss
from flowfleet.models.base import ModelAdapter
from flowfleet.models.registry import adapter_for
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.weights import lora, weights
from services.rollout.engines.base import GeneratedBatch, GenerationRequest
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.engines.vllm_omni.engine import VllmOmniEngine
from tests.filling import filling
from tests.services.rollout.conftest import final_of, path_of
from tests.services.rollout.test_engine import Recorder, Sender
from tests.services.rollout.test_families import batch_of, request_for
from tests.tiny_models import make_tiny

KINDS = ("stable_diffusion_3", pytest.param("wan_two_experts", marks=pytest.mark.long), "wan_5b")
TOLERANCE = 1e-4


@dataclass
class Pair:
    """Both engines with the same checkpoint in them, and what they draw before any update."""

    model: ModelSpec
    omni: VllmOmniEngine
    diffusers: DiffusersEngine

    def prepare(self, spec: LoraSpec | None) -> None:
        for engine in (self.omni, self.diffusers):
            asyncio.run(engine.prepare(self.model, spec))

    def draw(self, request: GenerationRequest) -> tuple[GeneratedBatch, GeneratedBatch]:
        return asyncio.run(batch_of(self.omni, request)), asyncio.run(batch_of(self.diffusers, request))

    @property
    def adapter(self) -> type[ModelAdapter]:
        return adapter_for(self.model.path)

    def experts(self) -> dict[str, torch.nn.Module]:
        loaded = self.adapter.load(self.model.path, dtype=torch.float32, components=("transformer",))
        return loaded.experts


@pytest.fixture(scope="module")
def omni() -> Iterator[VllmOmniEngine]:
    engine = VllmOmniEngine(torch.device("cpu"), max_batch=8, threads=1)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest,
    omni: VllmOmniEngine,
    engine: DiffusersEngine,
    tmp_path_factory: pytest.TempPathFactory,
) -> Pair:
    path = make_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)
    made = Pair(ModelSpec(path=str(path), dtype="float32"), omni, engine)
    made.prepare(None)
    return made


def assert_close(one: GeneratedBatch, other: GeneratedBatch) -> None:
    """The whole path within rounding: latents, log-probs, and pictures up to a level."""
    assert [sample.seed for sample in one.samples] == [sample.seed for sample in other.samples]
    for left, right in zip(one.samples, other.samples, strict=True):
        for name in ("latents", "next_latents", "log_probs"):
            torch.testing.assert_close(
                getattr(path_of(left), name), getattr(path_of(right), name), rtol=0, atol=TOLERANCE
            )
        assert np.abs(left.frames.astype(int) - right.frames.astype(int)).max() <= 1


def test_the_trajectory_is_that_of_the_diffusers_engine(pair: Pair) -> None:
    """Compares with guidance, and with both experts where there are two."""
    one, other = pair.draw(request_for(pair.model, guidance_scale=3.0, indices=(0, 1)))
    assert_close(one, other)
    again, _ = pair.draw(request_for(pair.model, guidance_scale=3.0, indices=(0, 1)))
    for left, right in zip(one.samples, again.samples, strict=True):
        assert torch.equal(path_of(left).next_latents, path_of(right).next_latents)


def test_full_weights_arrive_by_name_and_the_base_comes_back(pair: Pair) -> None:
    request = request_for(pair.model)
    base, _ = pair.draw(request)
    generator = torch.Generator().manual_seed(1)
    trained = {
        name: value + 0.02 * torch.randn(value.shape, generator=generator)
        for name, value in weights.full_parameters(pair.experts()).items()
    }
    buckets = weights.make_buckets(weights.specs_of(trained), bucket_bytes=100_000)
    recorder = Recorder()
    weights.send(recorder, buckets, filling(trained))
    with pytest.raises(ValueError, match="every weight once"):
        asyncio.run(pair.omni.receive(Sender(recorder.flats), buckets[:-1]))
    hashes = weights.tensor_hashes(trained.items())
    for engine in (pair.omni, pair.diffusers):
        asyncio.run(engine.receive(Sender(recorder.flats), buckets))
        assert asyncio.run(engine.verify(hashes)) == weights.digest(hashes)
    one, other = pair.draw(request)
    assert_close(one, other)
    assert not torch.allclose(path_of(one.samples[0]).next_latents, path_of(base.samples[0]).next_latents, atol=1e-2)

    pair.prepare(None)
    for left, right in zip(asyncio.run(batch_of(pair.omni, request)).samples, base.samples, strict=True):
        assert torch.equal(path_of(left).next_latents, path_of(right).next_latents)


def test_an_adapter_works_as_in_the_diffusers_engine(pair: Pair) -> None:
    """On every module that the family adapts by default, fused and not, of every expert."""
    spec = LoraSpec(rank=3, alpha=6.0, target_modules=list(pair.adapter.lora_targets))
    experts = pair.experts()
    generator = torch.Generator().manual_seed(2)
    state = {
        name: 0.2 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in lora.install_lora(experts, spec).items()
    }
    assert {name.partition(".")[0] for name in state} == set(experts)
    base, _ = pair.draw(request_for(pair.model))
    pair.prepare(spec)
    hashes = weights.tensor_hashes(state.items())
    for engine in (pair.omni, pair.diffusers):
        asyncio.run(engine.load_adapter(state))
        assert asyncio.run(engine.verify(hashes)) == weights.digest(hashes)
    one, other = pair.draw(request_for(pair.model))
    assert_close(one, other)
    assert not torch.allclose(path_of(one.samples[0]).next_latents, path_of(base.samples[0]).next_latents, atol=1e-2)

    name = next(iter(state))
    asyncio.run(pair.omni.load_adapter({**state, name: state[name] + 1e-6}))
    with pytest.raises(DataLoss, match=name):
        asyncio.run(pair.omni.verify(hashes))

    pair.prepare(None)
    restored, _ = pair.draw(request_for(pair.model))
    for left, right in zip(restored.samples, base.samples, strict=True):
        assert torch.equal(path_of(left).next_latents, path_of(right).next_latents)


def test_what_vllm_omni_cannot_adapt_is_refused(pair: Pair) -> None:
    """Linears that are torch's own there, and layers that do not exist; the engine continues."""
    torchs = "norm1.linear" if "stable" in pair.model.path else "time_proj"
    for target, message in ((torchs, "cannot adapt .*--engine diffusers"), ("nothing", "no module 'nothing'")):
        with pytest.raises(ValueError, match=message):
            asyncio.run(pair.omni.prepare(pair.model, LoraSpec(rank=2, alpha=2.0, target_modules=[target])))
    asyncio.run(pair.omni.prepare(pair.model, None))
    assert len(asyncio.run(batch_of(pair.omni, request_for(pair.model))).samples) == 2


def test_final_latents_are_kept_for_matching_losses(pair: Pair) -> None:
    one, other = pair.draw(request_for(pair.model, sde_steps=(), record="final"))
    for left, right in zip(one.samples, other.samples, strict=True):
        torch.testing.assert_close(final_of(left), final_of(right), rtol=0, atol=TOLERANCE)
