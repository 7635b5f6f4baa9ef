"""A sample with NaN is a failed one: of any part of the model, in any data type, and alone in its batch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowfleet.models.base import ModelAdapter
from flowfleet.models.registry import adapter_for
from flowfleet.proto.common_pb2 import Sample, SampleId
from flowfleet.proto.rollout_pb2 import GenerateEvent, GenerateRequest, ModelSpec
from services.rollout.engines.base import GeneratedBatch, GeneratedSample
from services.rollout.engines.sampler import Sampler, batches
from services.rollout.sampling.generation import Generation
from tests.services.rollout.conftest import make_request

PARTS = {"transformer": "latents", "text_encoder": "latents", "vae": "VAE decodes to NaN"}


def sampled(adapter: ModelAdapter) -> GeneratedBatch:
    request, sampler = make_request(indices=(0, 1)), Sampler(adapter)
    (rows,) = batches(request, 4)
    return sampler.sample(request, sampler.encode(request), rows, lambda: None)


def poison(module: nn.Module) -> None:
    """Makes its weights NaN, as an overflow in float16 does."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", PARTS)
def test_every_sample_of_a_model_with_a_weight_of_nan_fails(part: str, dtype: torch.dtype, model: ModelSpec) -> None:
    adapter = adapter_for(model.path).load(model.path, dtype=dtype)
    assert not any(sample.problem for sample in sampled(adapter).samples)
    poison(getattr(adapter.pipeline, part))
    problems = [sample.problem for sample in sampled(adapter).samples]
    assert len(problems) == 4
    assert all(PARTS[part] in problem for problem in problems)


def test_a_row_fails_alone(model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_for(model.path).load(model.path, dtype=torch.float32)
    expected, velocity = sampled(adapter).samples, adapter.velocity

    def broken(latents: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = velocity(latents, *args, **kwargs)
        found[2] = torch.inf
        return found

    monkeypatch.setattr(adapter, "velocity", broken)
    for row, (before, sample) in enumerate(zip(expected, sampled(adapter).samples, strict=True)):
        assert bool(sample.problem) == (row == 2)
        if row != 2:
            assert (sample.frames == before.frames).all()


async def events_of(batch: GeneratedBatch) -> list[GenerateEvent]:
    """What a caller of Generate hears of one batch."""

    async def generate(*_: Any) -> AsyncGenerator[GeneratedBatch, None]:
        yield batch

    class Publisher:
        async def publish(self, wire: GenerateRequest, good: GeneratedBatch) -> list[Sample]:
            return [Sample(id=SampleId(group=sample.group, index=sample.index)) for sample in good.samples]

    ignore: Callable[..., Any] = lambda *_: None  # noqa: E731
    metrics: Any = SimpleNamespace(published=ignore, encoded=ignore, peak_memory=ignore, dropped=ignore)
    cpu, publisher, request = torch.device("cpu"), Publisher(), SimpleNamespace(num_samples=len(batch.samples))
    parts: dict[str, Any] = {"wire": GenerateRequest(job_id="j", step=3), "request": request, "check": ignore}
    generation = Generation(cpu, generate, publisher, metrics, **parts, is_overtaken=ignore, on_done=ignore)  # type: ignore[arg-type]
    return [event async for event in generation.events()]


async def test_the_caller_hears_of_each_sample_whether_it_is_one() -> None:
    def record(value: float) -> Any:
        return SimpleNamespace(log_probs=torch.tensor([-1.0, value]))

    samples = (
        GeneratedSample(0, 0, 0, None),
        GeneratedSample(0, 1, 0, None, failure="its latents are NaN"),
        GeneratedSample(1, 0, 0, record(float("-inf"))),
        GeneratedSample(1, 1, 0, record(-2.0)),
    )
    events = await events_of(GeneratedBatch(samples, {}, {}, {}, {}))
    said = {(event.sample.id.group, event.sample.id.index): event.failure for event in events}
    assert said == {(0, 0): "", (0, 1): "its latents are NaN", (1, 0): samples[2].problem, (1, 1): ""}
    assert "log-probs are NaN or infinite" in said[1, 0]
