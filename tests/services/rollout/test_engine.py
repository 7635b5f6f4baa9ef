"""The diffusers engine in process, held to `QwenImagePipeline`, to the trainer's forward, and to its own promises."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, QwenImagePipeline

from flowfleet.algorithms.sde import reverse_step
from flowfleet.algorithms.solver import dpm_solver_2_step, predict, tail_sigmas
from flowfleet.errors import DataLoss
from flowfleet.hardware import devices
from flowfleet.models.base import ModelAdapter
from flowfleet.models.embeds import concat_embeds
from flowfleet.models.loading import dummy_parameter
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Guidance
from flowfleet.process.pulse import Pulse
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.quantization import layers
from flowfleet.quantization.rows import quantize_rows
from flowfleet.weights import lora, weights
from services.rollout.engines import acceleration
from services.rollout.engines.base import Cancelled, GeneratedBatch, GeneratedSample, GenerationRequest, RolloutEngine
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.engines.vllm_omni.engine import VllmOmniEngine
from tests.filling import filling
from tests.services.rollout.conftest import LORA, PROMPTS, SIZE, adapter_of, final_of, make_request, path_of
from tests.services.rollout.replica import make_adapter


async def collect(
    engine: RolloutEngine, request: GenerationRequest, cancelled: Callable[[], bool] = lambda: False
) -> list[GeneratedBatch]:
    return [batch async for batch in engine.generate(request, cancelled)]


def samples_of(batches: list[GeneratedBatch]) -> list[GeneratedSample]:
    return [sample for batch in batches for sample in batch.samples]


def assert_same(one: GeneratedSample, other: GeneratedSample) -> None:
    assert (one.group, one.index, one.seed) == (other.group, other.index, other.seed)
    assert np.array_equal(one.frames, other.frames)
    assert (one.record is None) == (other.record is None)
    if one.record is not None and other.record is not None:
        assert one.record.to_bytes() == other.record.to_bytes()


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
async def test_ode_draws_what_the_diffusers_pipeline_draws(
    engine: DiffusersEngine, model: ModelSpec, guidance_scale: float
) -> None:
    await engine.prepare(model, None)
    request = make_request(indices=(0, 1), sde_steps=(), guidance_scale=guidance_scale)
    ours = samples_of(await collect(engine, request))
    assert all(sample.record is None for sample in ours)

    pipeline: Any = QwenImagePipeline.from_pretrained(model.path)
    pipeline.set_progress_bar_config(disable=True)
    latents = adapter_for(model.path).load(model.path, dtype=torch.float32, components=())
    expected = pipeline(
        prompt=[PROMPTS[sample.group] for sample in ours],  # num_images_per_prompt would mix up the rows of the mask
        negative_prompt=[" "] * 4 if guidance_scale > 1 else None,
        true_cfg_scale=guidance_scale,
        latents=latents.initial_latents([sample.seed for sample in ours], SIZE),
        height=32,
        width=48,
        num_inference_steps=4,
        output_type="np",
    ).images
    for sample, image in zip(ours, expected, strict=True):
        assert sample.frames.shape == (1, 32, 48, 3)
        # A value may round to the neighboring byte, as ours decodes by 2-D convolutions.
        assert np.abs(sample.frames[0].astype(float) - image * 255).max() <= 0.51


def recomputed_without_gradient(
    adapter: ModelAdapter, request: GenerationRequest, batch: GeneratedBatch, step: int
) -> torch.Tensor:
    """(B,) log-probs of one stored step as a trainer computes them, from what the blobs hold."""
    pairs = [path_of(sample).pair(step) for sample in batch.samples]
    first = path_of(batch.samples[0])
    latents = torch.stack([pair[0] for pair in pairs])
    velocity = adapter.velocity(
        latents,
        first.timesteps[step],
        concat_embeds([batch.embeds[sample.group] for sample in batch.samples]),
        size=request.sampling.size,
        guidance=request.sampling.guidance,
        negative=concat_embeds([batch.negative[s.group] for s in batch.samples]) if batch.negative else None,
    )
    schedule = adapter.schedule(request.sampling.num_steps, request.sampling.size)
    return reverse_step(request.noise.step_type)(
        latents,
        velocity,
        first.sigmas[step],
        first.sigmas_next[step],
        eta=request.noise.eta,
        sigma_max=schedule.sigma_max,
        prev_sample=torch.stack([pair[1] for pair in pairs]),
    ).log_prob


def recomputed(adapter: ModelAdapter, request: GenerationRequest, batch: GeneratedBatch, step: int) -> torch.Tensor:
    """The same with gradients."""
    log_probs = recomputed_without_gradient(adapter, request, batch, step)
    assert log_probs.requires_grad
    return log_probs


@pytest.mark.parametrize("step_type", ["sde", "cps"])
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("is_lora", [True, False])
async def test_log_probs_equal_the_trainers_bit_for_bit(
    engine: DiffusersEngine, model: ModelSpec, step_type: str, guidance_scale: float, is_lora: bool
) -> None:
    await engine.prepare(model, LORA if is_lora else None)
    experts = adapter_of(engine).experts
    generator = torch.Generator().manual_seed(5)
    trained = lora.named_adapter_parameters(experts) if is_lora else weights.full_parameters(experts)
    if is_lora:
        for parameter in trained.values():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    request = make_request(step_type=step_type, guidance_scale=guidance_scale, sde_steps=(0, 1, 2))
    (batch,) = await collect(engine, request)
    for parameter in trained.values():
        parameter.requires_grad_(True)
    try:
        for step in range(3):
            stored = torch.stack([path_of(sample).log_probs[step] for sample in batch.samples])
            assert torch.equal(recomputed(adapter_of(engine), request, batch, step), stored)
    finally:
        for parameter in trained.values():
            parameter.requires_grad_(False)


async def test_repeated_requests_make_the_same_bits(engine: DiffusersEngine, model: ModelSpec) -> None:
    await engine.prepare(model, None)
    first, second = [samples_of(await collect(engine, make_request())) for _ in range(2)]
    for one, other in zip(first, second, strict=True):
        assert_same(one, other)
    assert not np.array_equal(first[0].frames, first[1].frames)


async def test_a_sample_depends_on_its_own_seed_only(engine: DiffusersEngine, model: ModelSpec) -> None:
    """Up to rounding: a kernel may sum in another order when the batch has another size."""
    await engine.prepare(model, None)
    together = samples_of(await collect(engine, make_request(indices=(0, 1, 2))))
    alone = samples_of(await collect(engine, make_request(indices=(2,))))
    for sample in alone:
        (same,) = [s for s in together if (s.group, s.index) == (sample.group, sample.index)]
        torch.testing.assert_close(
            path_of(sample).next_latents,
            path_of(same).next_latents,
            atol=1e-4,
            rtol=0,
        )


async def test_batches_are_cut_in_order_and_no_wider_than_their_prompts(model: ModelSpec) -> None:
    engine = DiffusersEngine(torch.device("cpu"), max_batch=4, threads=1)
    await engine.prepare(model, None)
    batches = await collect(engine, make_request())
    await engine.close()
    assert [[(s.group, s.index) for s in batch.samples] for batch in batches] == [
        [(0, 0), (0, 1), (0, 2), (1, 0)],
        [(1, 1), (1, 2)],
    ]
    long, padded = batches[0].embeds[0], batches[0].embeds[1]
    (short,) = batches[1].embeds.values()
    assert batches[1].embeds.keys() == {1}
    assert padded.embeds.shape == long.embeds.shape
    assert padded.has_padding  # its prompt is the shorter one
    assert not short.has_padding  # alone it needs no mask
    assert torch.equal(short.embeds, padded.embeds[:, : short.embeds.shape[1]])
    assert bool(short.mask.all())


async def test_noise_enters_in_the_window_only(engine: DiffusersEngine, model: ModelSpec) -> None:
    """Latents outside the window follow the ODE, so a trajectory is a pure function of its ends."""
    await engine.prepare(model, None)
    (batch,) = await collect(engine, make_request(sde_steps=(1, 3)))
    adapter = adapter_of(engine)
    schedule = adapter.schedule(4, SIZE)
    for sample in batch.samples:
        trajectory = path_of(sample)
        assert trajectory.step_indices.tolist() == [1, 3]
        assert torch.equal(trajectory.sigmas, schedule.sigmas[[1, 3]])
        assert torch.equal(trajectory.sigmas_next, schedule.sigmas[[2, 4]])
        assert torch.equal(trajectory.timesteps, schedule.timesteps[[1, 3]])
    latents = torch.stack([path_of(sample).next_latents[0] for sample in batch.samples])
    prompts = batch.embeds[0].repeat(3), batch.embeds[1].repeat(3)
    both = concat_embeds(prompts)
    with torch.no_grad():
        velocity = adapter.velocity(latents, schedule.timesteps[2], both, size=SIZE)
    expected = latents + (schedule.sigmas[3].double() - schedule.sigmas[2].double()).float() * velocity
    found = torch.stack([path_of(sample).latents[1] for sample in batch.samples])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
async def test_the_second_order_sampler_draws_what_diffusers_scheduler_draws(
    engine: DiffusersEngine, model: ModelSpec, guidance_scale: float
) -> None:
    """Hands that scheduler the model's own noise levels."""
    await engine.prepare(model, None)
    request = make_request(
        sde_steps=(), num_steps=6, sampler="dpm_solver_2", record="final", guidance_scale=guidance_scale
    )
    (batch,) = await collect(engine, request)
    (euler,) = await collect(engine, make_request(sde_steps=(), num_steps=6, record="final"))
    adapter = adapter_of(engine)
    schedule = adapter.schedule(6, SIZE)
    scheduler_class: Any = DPMSolverMultistepScheduler
    scheduler = scheduler_class(prediction_type="flow_prediction", use_flow_sigmas=True)
    scheduler.set_timesteps(6)
    scheduler.sigmas = schedule.sigmas
    latents = adapter.initial_latents([sample.seed for sample in batch.samples], SIZE)
    prompts = concat_embeds([batch.embeds[sample.group] for sample in batch.samples])
    negative = concat_embeds([batch.negative[s.group] for s in batch.samples]) if batch.negative else None
    for timestep, its_own in zip(schedule.timesteps, scheduler.timesteps, strict=True):
        with torch.no_grad():
            velocity = adapter.velocity(
                latents, timestep, prompts, size=SIZE, guidance=Guidance(guidance_scale), negative=negative
            )
        latents = scheduler.step(velocity, its_own, latents, return_dict=False)[0]
    found, other = (torch.stack([final_of(sample) for sample in made.samples]) for made in (batch, euler))
    torch.testing.assert_close(found, latents, rtol=0, atol=1e-5)
    assert (found - other).abs().max() > 1e-3


async def test_a_group_is_guided_by_its_own_negative_prompt(engine: DiffusersEngine, model: ModelSpec) -> None:
    """It replaces the job's; the other group keeps the job's."""
    await engine.prepare(model, None)
    job = make_request(guidance_scale=3.0)
    own = "a blurred photograph of nothing at all"
    mixed = replace(job, groups=(replace(job.groups[0], negative_prompt=own), job.groups[1]))
    as_job = replace(job, sampling=replace(job.sampling, negative_prompt=own))
    found, plain, all_own = [samples_of(await collect(engine, request)) for request in (mixed, job, as_job)]

    def latents(made: list[GeneratedSample], group: int) -> torch.Tensor:
        return torch.stack([path_of(sample).next_latents for sample in made if sample.group == group])

    torch.testing.assert_close(latents(found, 0), latents(all_own, 0), rtol=0, atol=1e-5)
    torch.testing.assert_close(latents(found, 1), latents(plain, 1), rtol=0, atol=1e-5)
    assert (latents(found, 0) - latents(plain, 0)).abs().max() > 1e-3


@pytest.mark.parametrize("step_type", ["sde", "cps"])
async def test_a_tail_leaves_what_is_trained_as_it_is(
    engine: DiffusersEngine, model: ModelSpec, step_type: str
) -> None:
    """Same bits up to the end of the last noisy step, in fewer calls; the pictures are coarser ones."""
    await engine.prepare(model, LORA)
    calls = []
    for tail_steps in (0, 3):
        asked: list[None] = []
        request = make_request(step_type=step_type, num_steps=10, sde_steps=(1, 2), tail_steps=tail_steps)
        (batch,) = await collect(engine, request, lambda asked=asked: bool(asked.append(None)))  # type: ignore[misc]
        calls.append((len(asked), batch))
    (whole, plain), (short, tailed) = calls
    assert (whole, short) == (10, 3 + 3)
    for one, other in zip(plain.samples, tailed.samples, strict=True):
        assert path_of(one).to_bytes() == path_of(other).to_bytes()
        assert not np.array_equal(one.frames, other.frames)
    for step in range(2):
        stored = torch.stack([path_of(sample).log_probs[step] for sample in tailed.samples])
        assert torch.equal(recomputed_without_gradient(adapter_of(engine), request, tailed, step), stored)


async def test_a_tail_follows_the_second_order_sampler_on_its_own_levels(
    engine: DiffusersEngine, model: ModelSpec
) -> None:
    await engine.prepare(model, None)
    request = make_request(num_steps=10, sde_steps=(0, 1), tail_steps=3, record="final")
    (batch,) = await collect(engine, request)
    (steps,) = await collect(engine, make_request(num_steps=10, sde_steps=(0, 1), tail_steps=3))
    adapter = adapter_of(engine)
    schedule = adapter.schedule(10, SIZE)
    sigmas = tail_sigmas(float(schedule.sigmas[2]), 0.8, 3)
    prompts = concat_embeds([batch.embeds[sample.group] for sample in batch.samples])

    def velocity(latents: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return adapter.velocity(latents, 1000 * sigma, prompts, size=SIZE)

    at_last_noisy = torch.stack([path_of(sample).latents[1] for sample in steps.samples])
    latents = torch.stack([path_of(sample).next_latents[1] for sample in steps.samples])
    before = predict(at_last_noisy, velocity(at_last_noisy, schedule.sigmas[1]), float(schedule.sigmas[1]))
    for sigma, sigma_next in pairwise(sigmas):
        v = velocity(latents, sigma)
        now = predict(latents, v, float(sigma))
        latents, before = dpm_solver_2_step(latents, v, float(sigma_next), now, before), now
    assert torch.equal(torch.stack([final_of(sample) for sample in batch.samples]), latents)


async def test_a_share_of_the_noisy_steps_is_recorded(engine: DiffusersEngine, model: ModelSpec) -> None:
    """The samples are those of all noisy steps; of the steps only those that were asked for are kept."""
    await engine.prepare(model, None)
    request = make_request(sde_steps=(0, 1, 2))
    (whole,) = await collect(engine, request)
    (part,) = await collect(engine, replace(request, noise=replace(request.noise, recorded=(0, 2))))
    for one, other in zip(whole.samples, part.samples, strict=True):
        assert np.array_equal(one.frames, other.frames)
        assert path_of(other).step_indices.tolist() == [0, 2]
        for name in ("latents", "next_latents", "log_probs", "sigmas", "sigmas_next", "timesteps"):
            assert torch.equal(getattr(path_of(one), name)[[0, 2]], getattr(path_of(other), name))


async def test_a_jobs_shift_is_the_schedules(engine: DiffusersEngine, model: ModelSpec) -> None:
    await engine.prepare(model, None)
    request = make_request(sde_steps=(1, 2))
    shifted = replace(request, sampling=replace(request.sampling, shift=2.5))
    (batch,) = await collect(engine, shifted)
    u = np.linspace(1, 1 / 4, 4)
    np.testing.assert_allclose(path_of(batch.samples[0]).sigmas, (2.5 * u / (1 + 1.5 * u))[1:3], rtol=1e-6)


async def test_a_group_can_share_its_initial_noise(engine: DiffusersEngine, model: ModelSpec) -> None:
    await engine.prepare(model, None)
    (batch,) = await collect(engine, make_request(sde_steps=(0,), share_initial=True))
    starts = {g: [path_of(s).latents[0] for s in batch.samples if s.group == g] for g in (0, 1)}
    for group in starts.values():
        assert all(torch.equal(start, group[0]) for start in group)
    assert not torch.equal(starts[0][0], starts[1][0])
    (refill,) = await collect(engine, make_request(sde_steps=(0,), share_initial=True, indices=(5,)))
    assert torch.equal(path_of(refill.samples[0]).latents[0], starts[0][0])
    ends = [path_of(s).next_latents[0] for s in batch.samples if s.group == 0]
    assert not torch.equal(ends[0], ends[1])


async def test_cancelled_work_stops_at_the_next_step(engine: DiffusersEngine, model: ModelSpec) -> None:
    await engine.prepare(model, None)
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 2

    with pytest.raises(Cancelled):
        await collect(engine, make_request(), cancelled)
    assert asked == 3
    assert engine.pulse.stalled_s() == 0.0
    assert len(samples_of(await collect(engine, make_request()))) == 6


def untrained(model: ModelSpec, spec: LoraSpec) -> dict[str, torch.Tensor]:
    """An adapter before its first update."""
    adapter = adapter_for(model.path).load(model.path, dtype=torch.float32, components=("transformer",))
    return {name: value.detach() for name, value in lora.install_lora(adapter.experts, spec).items()}


def velocity_by(adapter: ModelAdapter, request: GenerationRequest, batch: GeneratedBatch, step: int) -> np.ndarray:
    """(B, *latent) float64 of one stored step, by some other copy of the model."""
    with torch.no_grad():
        velocity = adapter.velocity(
            torch.stack([path_of(sample).latents[step] for sample in batch.samples]),
            path_of(batch.samples[0]).timesteps[step],
            concat_embeds([batch.embeds[sample.group] for sample in batch.samples]),
            size=request.sampling.size,
            guidance=request.sampling.guidance,
            negative=concat_embeds([batch.negative[s.group] for s in batch.samples]) if batch.negative else None,
        )
    return velocity.double().numpy()


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
async def test_the_reference_kl_is_that_of_the_steps_with_and_without_adapter(
    engine: RolloutEngine, model: ModelSpec, guidance_scale: float
) -> None:
    """Against two models of our own, one without any adapter, and the formula of the `sde` step in float64."""
    state = make_adapter(model, LORA, 3)
    plain, adapted = (
        adapter_for(model.path).load(model.path, dtype=torch.float32, components=("transformer",)) for _ in range(2)
    )
    lora.install_lora(adapted.experts, LORA)
    lora.load_adapter(adapted.experts, state)
    await engine.prepare(model, LORA)
    await engine.load_adapter(state)
    request = replace(make_request(guidance_scale=guidance_scale), reference_kl=True)
    (batch,) = await collect(engine, request)
    expected = np.zeros(len(batch.samples))
    for step in range(2):
        path = path_of(batch.samples[0])
        sigma, sigma_next = float(path.sigmas[step]), float(path.sigmas_next[step])
        dt, b2 = sigma_next - sigma, 0.7**2 * sigma / (1 - sigma)
        change = velocity_by(adapted, request, batch, step) - velocity_by(plain, request, batch, step)
        drift = change * (1 + b2 * (1 - sigma) / (2 * sigma)) * dt
        expected += (drift**2).reshape(len(drift), -1).mean(1) / (2 * b2 * -dt) / 2
    measured = [sample.reference_kl for sample in batch.samples]
    assert min(expected) > 1e-5
    np.testing.assert_allclose(measured, expected, rtol=1e-3)


async def test_the_reference_kl_changes_no_sample_and_is_0_before_training(
    engine: RolloutEngine, model: ModelSpec
) -> None:
    await engine.prepare(model, LORA)
    for state, is_zero in ((make_adapter(model, LORA, 3), False), (untrained(model, LORA), True)):
        await engine.load_adapter(state)
        without, measured = [
            samples_of(await collect(engine, replace(make_request(), reference_kl=wanted))) for wanted in (False, True)
        ]
        for one, other in zip(without, measured, strict=True):
            assert_same(one, other)
            assert one.reference_kl == 0
            assert (other.reference_kl == 0) == is_zero


async def test_full_weights_have_no_reference_kl(engine: RolloutEngine, model: ModelSpec) -> None:
    await engine.prepare(model, None)
    with pytest.raises(ValueError, match=r"reference_kl: .*set trainer.mode to lora or algorithm.kl_reward to 0"):
        await collect(engine, replace(make_request(), reference_kl=True))


async def test_an_adapter_replaces_another_and_leaves_without_trace(engine: DiffusersEngine, model: ModelSpec) -> None:
    await engine.prepare(model, None)
    base = samples_of(await collect(engine, make_request()))
    other = LoraSpec(rank=2, alpha=2.0, target_modules=["to_k"])
    for spec, seed in ((other, 1), (LORA, 2)):
        state = make_adapter(model, spec, seed)
        await engine.prepare(model, spec)
        await engine.load_adapter(state)
        assert await engine.verify(weights.tensor_hashes(state.items())) == weights.digest(
            weights.tensor_hashes(state.items())
        )
        assert not np.array_equal(samples_of(await collect(engine, make_request()))[0].frames, base[0].frames)
    await engine.prepare(model, None)
    for one, two in zip(base, samples_of(await collect(engine, make_request())), strict=True):
        assert_same(one, two)


async def test_verify_refuses_one_wrong_element_and_a_missing_name(engine: DiffusersEngine, model: ModelSpec) -> None:
    await engine.prepare(model, LORA)
    state = make_adapter(model, LORA, 3)
    hashes = weights.tensor_hashes(state.items())
    name = next(iter(state))
    await engine.load_adapter({**state, name: state[name] + 1e-6})
    with pytest.raises(DataLoss, match=name):
        await engine.verify(hashes)
    await engine.load_adapter(state)
    with pytest.raises(DataLoss):
        await engine.verify({key: value for key, value in hashes.items() if key != name})
    with pytest.raises(ValueError, match="does not fit"):
        await engine.load_adapter({key: value for key, value in state.items() if key != name})


class Sender:
    """A transfer group's member that hands out what a trainer would send, bucket by bucket."""

    device = torch.device("cpu")

    def __init__(self, flats: list[torch.Tensor]) -> None:
        self._flats = iter(flats)

    def broadcast(self, flat: torch.Tensor) -> "Sender":
        flat.copy_(next(self._flats))
        return self

    def wait(self) -> None:
        pass


class Recorder(Sender):
    """The sending end: keeps the buckets' bytes."""

    def __init__(self) -> None:
        self.flats: list[torch.Tensor] = []

    def broadcast(self, flat: torch.Tensor) -> "Recorder":
        self.flats.append(flat.clone())
        return self


async def test_full_weights_are_received_whole_and_the_next_job_gets_the_base_back(
    engine: DiffusersEngine, model: ModelSpec
) -> None:
    await engine.prepare(model, None)
    base = samples_of(await collect(engine, make_request()))
    adapter = adapter_for(model.path).load(model.path, dtype=torch.float32, components=("transformer",))
    trained = {name: value + 0.01 for name, value in weights.full_parameters(adapter.experts).items()}
    buckets = weights.make_buckets(weights.specs_of(trained), bucket_bytes=100_000)
    assert len(buckets) > 3
    recorder = Recorder()
    weights.send(recorder, buckets, filling(trained))
    with pytest.raises(ValueError, match="every weight once"):
        await engine.receive(Sender(recorder.flats), buckets[:-1])
    await engine.receive(Sender(recorder.flats), buckets)
    await engine.verify(weights.tensor_hashes(trained.items()))
    assert not np.array_equal(samples_of(await collect(engine, make_request()))[0].frames, base[0].frames)

    await engine.prepare(model, None)
    for one, two in zip(base, samples_of(await collect(engine, make_request())), strict=True):
        assert_same(one, two)


async def test_a_model_that_is_not_there_is_the_users_mistake(engine: DiffusersEngine, model: ModelSpec) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        await engine.prepare(ModelSpec(path="/nowhere", dtype="float32"), None)
    with pytest.raises(ValueError, match="no_such_module"):
        await engine.prepare(model, LoraSpec(rank=1, alpha=1.0, target_modules=["no_such_module"]))
    await engine.prepare(model, None)


async def fp8_linears(engine: RolloutEngine) -> list[Any]:
    """The live ones, of either engine."""
    if isinstance(engine, VllmOmniEngine):
        experts = await engine._perform("prepare", lambda worker: worker.model_runner.pipeline.experts)
    else:
        assert isinstance(engine, DiffusersEngine)
        experts = adapter_of(engine).experts
    return [module for expert in experts.values() for module in expert.modules() if "fp8_weight" in module._buffers]


async def scales_of(engine: RolloutEngine) -> torch.Tensor:
    """What the forward multiplies by, of every linear."""
    return torch.cat([linear.fp8_scale.flatten() for linear in await fp8_linears(engine)])


@pytest.mark.parametrize("engine_class", [DiffusersEngine, pytest.param(VllmOmniEngine, marks=pytest.mark.long)])
async def test_a_quantized_model_computes_with_the_weights_that_were_verified_last(
    monkeypatch: pytest.MonkeyPatch,
    tiny_qwen_image: Path,
    engine_class: type[DiffusersEngine] | type[VllmOmniEngine],
) -> None:
    """Weights twice as large have scales twice as large. They are in use once they are verified, not before, and no
    more when the next job has the base back."""
    monkeypatch.setattr(devices, "has_fp8", lambda device: True)  # the CPU multiplies so as well, slowly
    monkeypatch.setattr(layers, "MIN_SIZE", 16)
    engine = engine_class(torch.device("cpu"), max_batch=8, threads=1)
    model = ModelSpec(path=str(tiny_qwen_image), dtype="bfloat16", quantization="fp8")
    await engine.prepare(model, None)
    base = (await scales_of(engine)).clone()
    assert len(base) > 0
    adapter = adapter_for(model.path).load(model.path, dtype=torch.bfloat16, components=("transformer",))
    trained = {name: value * 2 for name, value in weights.full_parameters(adapter.experts).items()}
    buckets, hashes = weights.make_buckets(weights.specs_of(trained)), weights.tensor_hashes(trained.items())
    recorder = Recorder()
    weights.send(recorder, buckets, filling(trained))

    await engine.receive(Sender(recorder.flats), buckets)
    with pytest.raises(DataLoss):
        await engine.verify({name: value + 1 for name, value in hashes.items()})
    assert torch.equal(await scales_of(engine), base)
    await engine.verify(hashes)
    assert torch.equal(await scales_of(engine), base * 2)
    for linear in await fp8_linears(engine):
        quantized, scale = quantize_rows(linear.weight)
        assert torch.equal(linear.fp8_weight.float(), quantized.float())
        assert torch.equal(linear.fp8_scale, scale.t())
    await engine.prepare(model, None)
    assert torch.equal(await scales_of(engine), base)
    await engine.close()


async def test_what_the_device_cannot_do_is_the_users_mistake(tiny_qwen_image: Path) -> None:
    engine = DiffusersEngine(torch.device("cpu"), max_batch=8, threads=1)
    model = ModelSpec(path=str(tiny_qwen_image), dtype="bfloat16", quantization="fp8")
    with pytest.raises(ValueError, match=r"rollout.quantization = 'fp8' needs"):
        await engine.prepare(model, None)
    model.quantization = ""
    await engine.prepare(model, None)
    assert await collect(engine, make_request(num_groups=1))
    await engine.close()


@pytest.mark.long
async def test_a_compilation_three_times_as_long_as_the_limit_is_no_hang(
    tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one in the middle of a run, of a size that was sampled before: only the compiler can tell."""
    hang_s = 0.3
    compiled: list[bool] = []

    def slow_backend(module: Any, inputs: Any) -> Any:
        time.sleep(3 * hang_s)
        compiled.append(engine.pulse.is_stuck)
        return module.forward

    compile_blocks, backend = acceleration.compile_blocks, cast(Any, slow_backend)
    monkeypatch.setattr(acceleration, "compile_blocks", lambda experts: compile_blocks(experts, backend))
    engine = DiffusersEngine(torch.device("cpu"), max_batch=8, threads=1, pulse=Pulse(hang_s, 600.0, shared=True))
    await engine.prepare(ModelSpec(path=str(tiny_qwen_image), dtype="float32", compile=True), None)
    for _ in range(2):
        torch._dynamo.reset()
        del compiled[:]
        assert await collect(engine, make_request(num_groups=1))
        assert compiled
        assert not any(compiled)
    await engine.close()
    torch._dynamo.reset()


async def test_dummy_weights_are_drawn_from_their_names(tiny_qwen_image: Path) -> None:
    engine = DiffusersEngine(torch.device("cpu"), max_batch=8, threads=1)
    await engine.prepare(ModelSpec(path=str(tiny_qwen_image), dtype="float32", load_format="dummy"), None)
    name, live = next(iter(weights.full_parameters(adapter_of(engine).experts).items()))
    assert torch.equal(live, dummy_parameter(name, tuple(live.shape), live.dtype, live.device))
    await engine.close()
