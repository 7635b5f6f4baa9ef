"""An engine with an adapter a slot: forwards of one job, and of several at once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowfleet.algorithms.sde import reverse_step
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Size
from flowfleet.proto.rollout_pb2 import Adapter, LoraSpec, ModelSpec
from services.rollout.engines.base import Cancelled, GeneratedSample, GenerationRequest, forward_key
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.engines.turns import Share
from tests.services.rollout.conftest import LORA, adapter_of, make_request, path_of
from tests.services.rollout.replica import make_adapter
from tests.tiny_models import make_tiny

LORAS = (LORA, LoraSpec(rank=6, alpha=3.0, target_modules=LORA.target_modules), LORA, LORA)
MAX_GAP = 1e-5


class Counting(DiffusersEngine):
    """Counts the parts of each forward."""

    def __init__(self, *, stacks: bool) -> None:
        super().__init__(torch.device("cpu"), max_batch=64, threads=1)
        self.stacks, self.parts = stacks, list[int]()

    def _sample_parts(self, parts):  # type: ignore[no-untyped-def]
        self.parts.append(len(parts))
        return super()._sample_parts(parts)


@pytest.fixture(params=[False, True], ids=["runs", "grouped"])
async def engine(request: pytest.FixtureRequest, model: ModelSpec) -> AsyncIterator[Counting]:
    engine = Counting(stacks=request.param)
    await engine.share(Adapter(model=model, lora=LORA))
    for slot, lora in enumerate(LORAS):
        await engine.hold(slot, Adapter(model=model, lora=lora), make_adapter(model, lora, slot))
    yield engine
    await engine.close()


async def samples_of(
    engine: DiffusersEngine, slot: int, request: GenerationRequest, *, alone: bool = False
) -> list[GeneratedSample]:
    share = Share(f"job-{slot}", key=None if alone else forward_key(request), rows=64)
    batches = engine.generate_with(slot, share, request, lambda: False)
    return [sample async for batch in batches for sample in batch.samples]


async def mixed(engine: Counting, *requests: GenerationRequest, waiting: int = 0) -> list[list[GeneratedSample]]:
    """A request a slot, all of which wait before the first forward begins."""

    async def once_all_wait() -> None:
        while len(engine._waiting) < (waiting or len(requests)):
            await asyncio.sleep(0.001)
        await engine._run_waiting()

    engine.parts.clear()
    engine._pump = asyncio.create_task(once_all_wait())
    return await asyncio.gather(*(samples_of(engine, slot, request) for slot, request in enumerate(requests)))


def away(one: Sequence[GeneratedSample], other: Sequence[GeneratedSample]) -> float:
    """Largest difference of the paths."""
    pairs = zip(one, other, strict=True)
    return max(float((path_of(a).next_latents - path_of(b).next_latents).abs().max()) for a, b in pairs)


@torch.no_grad()
def gap(engine: Counting, slot: int, request: GenerationRequest, samples: Sequence[GeneratedSample]) -> float:
    """Mean difference of recorded log-probs to those that a trainer computes with the slot's adapter."""
    engine._activate(engine._held[slot])
    encoded, gaps = engine._encode(request), []
    for sample in samples:
        path, prompts = path_of(sample), encoded.of([sample.group])
        for place, step in enumerate(path.step_indices.tolist()):
            latents = path.latents[place][None]
            guided = {"size": request.sampling.size, "guidance": request.sampling.guidance, "negative": prompts[1]}
            velocity = adapter_of(engine).velocity(latents, path.timesteps[place], prompts[0], **guided)
            sigmas = adapter_of(engine).schedule(request.sampling.num_steps, request.sampling.size, None)
            result = reverse_step(request.noise.step_type)(
                latents,
                velocity,
                sigma=path.sigmas[place].item(),
                sigma_next=path.sigmas_next[place].item(),
                eta=request.noise.eta,
                sigma_max=sigmas.sigma_max,
                prev_sample=path.next_latents[place][None],
            )
            assert step in request.noise.steps
            gaps.append(float((result.log_prob - path.log_probs[place]).abs()))
    return sum(gaps) / len(gaps)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
async def test_rows_of_a_mixed_forward_have_the_log_probs_of_their_own(engine: Counting, guidance: float) -> None:
    request = make_request(guidance_scale=guidance)
    own = [await samples_of(engine, slot, request, alone=True) for slot in range(len(LORAS))]
    assert away(own[0], own[1]) > 1e-3
    together = await mixed(engine, *[request] * 4)
    assert engine.parts == [4]
    for slot, (alone, one) in enumerate(zip(own, together, strict=True)):
        assert [(s.group, s.index, s.seed) for s in alone] == [(s.group, s.index, s.seed) for s in one]
        assert away(alone, one) < 1e-4
        assert gap(engine, slot, request, one) <= MAX_GAP < gap(engine, 1 if slot != 1 else 0, request, one)


async def test_nan_in_one_adapter_reaches_no_row_of_another(engine: Counting, model: ModelSpec) -> None:
    request = make_request()
    good = await mixed(engine, *[request] * 4)
    state: dict[str, Tensor] = {name: t * torch.nan for name, t in make_adapter(model, LORA, 3).items()}
    await engine.hold(3, Adapter(model=model, lora=LORA), state)
    bad = await mixed(engine, *[request] * 4)
    assert engine.parts == [4]
    assert all(sample.problem for sample in bad[3])
    for slot in range(3):
        assert not any(sample.problem for sample in bad[slot])
        assert away(good[slot], bad[slot]) == 0


async def test_a_job_that_is_deleted_in_a_mixed_forward_changes_no_other(engine: Counting) -> None:
    request, asked = make_request(), 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 2

    good = await mixed(engine, *[request] * 4)

    async def deleted() -> None:
        share = Share("job-3", key=forward_key(request), rows=64)
        with pytest.raises(Cancelled):
            _ = [batch async for batch in engine.generate_with(3, share, request, cancelled)]

    leaving = asyncio.create_task(deleted())
    bad = await mixed(engine, *[request] * 3, waiting=4)
    await leaving
    assert engine.parts == [4]
    assert asked == 3
    for slot in range(3):
        assert away(good[slot], bad[slot]) == 0


async def test_requests_with_other_settings_have_a_forward_of_their_own(engine: Counting) -> None:
    request = make_request()
    other = replace(request, noise=replace(request.noise, eta=0.5))
    await mixed(engine, request, other, request, other)
    assert engine.parts == [2, 2]
    assert forward_key(replace(request, sampling=replace(request.sampling, shift=2.0))) != forward_key(request)


async def test_an_adapter_that_does_not_fit_is_refused_and_the_slots_stay(engine: Counting, model: ModelSpec) -> None:
    request = make_request()
    before = await samples_of(engine, 0, request, alone=True)
    with pytest.raises(ValueError, match="missing"):
        await engine.hold(0, Adapter(model=model, lora=LORA), {})
    with pytest.raises(ValueError, match=r"is torch.float32 \(4, .*expected torch.float32 \(6"):
        await engine.hold(0, Adapter(model=model, lora=LORAS[1]), make_adapter(model, LORA, 0))
    assert away(before, await samples_of(engine, 0, request, alone=True)) == 0


async def test_a_model_that_flattens_rows_mixes_no_adapters(tmp_path: Path) -> None:
    model = ModelSpec(path=str(make_tiny("krea2", tmp_path)), dtype="float32")
    lora = LoraSpec(rank=2, alpha=4.0, target_modules=adapter_for(model.path).lora_targets)
    engine, request = Counting(stacks=False), make_request(size=Size(32, 32))
    await engine.share(Adapter(model=model, lora=lora))
    for slot in range(2):
        await engine.hold(slot, Adapter(model=model, lora=lora), make_adapter(model, lora, slot))
    own = [await samples_of(engine, slot, request, alone=True) for slot in range(2)]
    assert engine.mixes
    together = await mixed(engine, request, request)
    assert engine.parts == [2, 1, 1]
    assert not engine.mixes
    assert all(away(alone, one) == 0 for alone, one in zip(own, together, strict=True))
    await engine.close()
