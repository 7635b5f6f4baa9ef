"""Every model family through the diffusers engine: its promises hold for videos, edits and experts as well."""

import asyncio
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image

from flowfleet.algorithms.parts import LatentParts, joined
from flowfleet.algorithms.sde import ode_step, reverse_step
from flowfleet.errors import DataLoss
from flowfleet.models.embeds import PromptEmbeds, concat_embeds
from flowfleet.models.registry import family_of
from flowfleet.models.settings import Guidance, Size
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.weights import lora, weights
from services.rollout.engines.base import GeneratedBatch, GenerationRequest, RolloutEngine
from services.rollout.engines.diffusers import DiffusersEngine
from tests.services.rollout.conftest import adapter_of, final_of, make_request, path_of
from tests.tiny_models import MAKERS, make_tiny

VIDEO_FRAMES = 9
NUM_STEPS = 2
"""The second one is of the low-noise expert where there are two."""
CONDITION_PIXELS = 32 * 32


@pytest.fixture(scope="module", params=sorted(MAKERS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Each kind of checkpoint in turn."""
    path = make_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)
    return ModelSpec(path=str(path), dtype="float32")


@pytest.fixture(scope="module")
def ready(engine: DiffusersEngine, model: ModelSpec) -> DiffusersEngine:
    """The engine with that checkpoint in it, without an adapter."""
    asyncio.run(engine.prepare(model, None))
    return engine


def picture(seed: int, width: int = 40, height: int = 40) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def request_for(model: ModelSpec, **changes: Any) -> GenerationRequest:
    """Two groups with prompts of different lengths, as the family needs them."""
    family = family_of(model.path)
    frames = VIDEO_FRAMES if family.modality == "video" else 1
    usual: dict[str, Any] = {"indices": (0,), "sde_steps": (0, 1), "num_steps": NUM_STEPS, "size": Size(32, 32, frames)}
    request = make_request(**usual | changes)
    if not family.takes_images or (family.holds_first_frame and not model.path.endswith("wan_5b")):
        return request
    groups = tuple(replace(group, images=(picture(group.group),)) for group in request.groups)
    if frames == 1:
        sampling = replace(request.sampling, condition_pixels=CONDITION_PIXELS)
    else:
        size = replace(request.sampling.size, clean_frames=int(family.holds_first_frame))
        sampling = replace(request.sampling, size=size)
    return replace(request, groups=groups, sampling=sampling)


async def batch_of(engine: RolloutEngine, request: GenerationRequest) -> GeneratedBatch:
    """The only batch of a request."""
    (batch,) = [batch async for batch in engine.generate(request, lambda: False)]
    return batch


def prompts_of(batch: GeneratedBatch) -> tuple[PromptEmbeds, PromptEmbeds | None]:
    """A row a sample, from what the blobs hold."""
    groups = [sample.group for sample in batch.samples]
    negative = concat_embeds([batch.negative[group] for group in groups]) if batch.negative else None
    return concat_embeds([batch.embeds[group] for group in groups]), negative


async def test_stored_steps_are_the_trainers_bit_for_bit(ready: DiffusersEngine, model: ModelSpec) -> None:
    """Log-probs recomputed with gradients from the blobs alone equal the stored ones: the ratio is exactly 1."""
    request = request_for(model, guidance_scale=3.0)
    batch, adapter = await batch_of(ready, request), adapter_of(ready)
    prompts, negative = prompts_of(batch)
    assert negative is not None
    for module in adapter.experts.values():
        module.requires_grad_(True)
    paths = [path_of(sample) for sample in batch.samples]
    for step in range(NUM_STEPS):
        latents = torch.stack([path.latents[step] for path in paths])
        velocity = adapter.velocity(
            latents,
            paths[0].timesteps[step],
            prompts,
            size=request.sampling.size,
            guidance=request.sampling.guidance,
            negative=negative,
        )
        assert velocity.requires_grad
        parts = LatentParts.of(adapter.part_lengths(request.sampling.size), None)
        result = replace(reverse_step("sde"), parts=parts)(
            latents,
            velocity,
            paths[0].sigmas[step],
            paths[0].sigmas_next[step],
            eta=request.noise.eta,
            sigma_max=adapter.schedule(NUM_STEPS, request.sampling.size).sigma_max,
            prev_sample=torch.stack([path.next_latents[step] for path in paths]),
        )
        stored = torch.stack([path.log_probs[step] for path in paths])
        assert torch.equal(result.log_prob, joined(stored, parts) if parts else stored)
    for module in adapter.experts.values():
        module.requires_grad_(False)


@pytest.mark.parametrize(("guidance_scale", "sde_steps"), [(1.0, ()), (3.0, (0, 1))])
async def test_the_ode_ends_where_euler_steps_end(
    ready: DiffusersEngine, model: ModelSpec, guidance_scale: float, sde_steps: tuple[int, ...]
) -> None:
    """Without noisy steps, or with noise of no strength: final latents, and frames that are their decoding."""
    request = request_for(model, guidance_scale=guidance_scale, sde_steps=sde_steps, eta=0.0, record="final")
    batch, adapter, size = await batch_of(ready, request), adapter_of(ready), request.sampling.size
    prompts, negative = prompts_of(batch)
    schedule = adapter.schedule(NUM_STEPS, size)
    latents = adapter.initial_latents([sample.seed for sample in batch.samples], size)
    with torch.no_grad():
        for step in range(NUM_STEPS):
            velocity = adapter.velocity(
                latents,
                schedule.timesteps[step],
                prompts,
                size=size,
                guidance=request.sampling.guidance,
                negative=negative,
            )
            latents = ode_step(latents, velocity, schedule.sigmas[step], schedule.sigmas[step + 1])
    assert torch.equal(torch.stack([final_of(sample) for sample in batch.samples]), latents)
    frames = np.stack([sample.frames for sample in batch.samples])
    assert frames.shape == (2, size.num_frames, 32, 32, 3)
    assert np.array_equal(frames, adapter.decode(latents, size, prompts).numpy())


async def test_a_request_repeated_makes_the_same_bits_whatever_is_recorded(
    ready: DiffusersEngine, model: ModelSpec
) -> None:
    """The final latents are the end of the recorded steps if noise reaches the last step."""
    first, again = [await batch_of(ready, request_for(model, record=record)) for record in ("steps", "final")]
    assert not first.negative
    for one, same in zip(first.samples, again.samples, strict=True):
        assert torch.equal(path_of(one).next_latents[-1], final_of(same))
        assert np.array_equal(one.frames, same.frames)
        assert (one.sound is not None) == family_of(model.path).sounds
        if one.sound and same.sound:
            assert np.array_equal(one.sound.samples, same.sound.samples)
    assert not np.array_equal(first.samples[0].frames, first.samples[1].frames)


async def test_finished_media_become_latents(ready: DiffusersEngine, model: ModelSpec) -> None:
    """They equal the adapter's latents, row by row, and come with the prompts' embeds."""
    request = request_for(model, sde_steps=(), record="final", indices=(3, 5))
    size = request.sampling.size
    rng = np.random.default_rng(4)
    media = [rng.integers(0, 256, (size.num_frames, 32, 32, 3), dtype=np.uint8) for _ in range(4)]
    groups = tuple(
        replace(group, media=tuple(media[2 * place : 2 * place + 2])) for place, group in enumerate(request.groups)
    )
    request = replace(request, groups=groups)
    if family_of(model.path).sounds:
        with pytest.raises(ValueError, match="read without"):
            await batch_of(ready, request)
        return
    batch = await batch_of(ready, request)
    expected = [adapter_of(ready).encode_media(torch.from_numpy(frames[None]), size)[0] for frames in media]
    assert [(sample.group, sample.index) for sample in batch.samples] == [(0, 3), (0, 5), (1, 3), (1, 5)]
    for sample, frames, latents in zip(batch.samples, media, expected, strict=True):
        assert np.array_equal(sample.frames, frames)
        assert torch.equal(final_of(sample), latents)
    assert batch.embeds.keys() == {0, 1}


async def test_every_expert_is_updated_and_verified(ready: DiffusersEngine, model: ModelSpec) -> None:
    adapter = adapter_of(ready)
    base = await batch_of(ready, request_for(model, sde_steps=(), record="final"))
    spec = LoraSpec(rank=2, alpha=2.0, target_modules=list(adapter.lora_targets)[:2])
    await ready.prepare(model, spec)
    generator = torch.Generator().manual_seed(3)
    shapes = {name: parameter.shape for name, parameter in lora.named_adapter_parameters(adapter.experts).items()}
    assert {name.partition(".")[0] for name in shapes} == set(adapter.experts)
    state = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    await ready.load_adapter(state)
    hashes = weights.tensor_hashes(state.items())
    assert await ready.verify(hashes) == weights.digest(hashes)
    for component in adapter.experts:
        name = next(name for name in state if name.startswith(f"{component}."))
        await ready.load_adapter({**state, name: state[name] + 1e-6})
        with pytest.raises(DataLoss, match=name):
            await ready.verify(hashes)
    await ready.load_adapter(state)
    changed = await batch_of(ready, request_for(model, sde_steps=(), record="final"))
    assert not torch.equal(final_of(changed.samples[0]), final_of(base.samples[0]))
    await ready.prepare(model, None)


async def test_settings_that_a_family_would_not_heed_are_refused(ready: DiffusersEngine, model: ModelSpec) -> None:
    family, request = family_of(model.path), request_for(model)
    sampling = request.sampling
    if not family.embedded_guidance:
        told = replace(sampling, guidance=Guidance(1.0, 2.0))
        with pytest.raises(ValueError, match="takes no embedded guidance"):
            await batch_of(ready, replace(request, sampling=told))
    if family.takes_images and not family.images_optional:
        bare = tuple(replace(group, images=()) for group in request.groups)
        with pytest.raises(ValueError, match="needs condition images"):
            await batch_of(ready, replace(request, groups=bare))
    elif not family.takes_images:
        shown = tuple(replace(group, images=(picture(1),)) for group in request.groups)
        with pytest.raises(ValueError, match="takes no condition images"):
            await batch_of(ready, replace(request, groups=shown))
        with pytest.raises(ValueError, match="condition_pixels"):
            await batch_of(ready, replace(request, sampling=replace(sampling, condition_pixels=1024)))
    with pytest.raises(ValueError, match="frames"):
        await batch_of(ready, replace(request, sampling=replace(sampling, size=Size(32, 32, 3))))


async def test_a_distilled_model_heeds_its_embedded_guidance(engine: DiffusersEngine, tmp_path: Path) -> None:
    """Left out, it is the default of diffusers' pipeline; a checkpoint without that input refuses it."""
    default = inspect.signature(FluxPipeline.__call__).parameters["guidance_scale"].default

    async def end(model: ModelSpec, strength: float | None) -> torch.Tensor:
        request = request_for(model, sde_steps=(), record="final")
        sampling = replace(request.sampling, guidance=Guidance(1.0, strength))
        return final_of((await batch_of(engine, replace(request, sampling=sampling))).samples[0])

    for kind in ("flux_distilled", "flux"):
        model = ModelSpec(path=str(make_tiny(kind, tmp_path / kind)), dtype="float32")
        await engine.prepare(model, None)
        if kind == "flux_distilled":
            assert torch.equal(await end(model, None), await end(model, default))
            assert not torch.allclose(await end(model, None), await end(model, 1.0), atol=1e-3)
        else:
            with pytest.raises(ValueError, match="takes no embedded guidance"):
                await end(model, default)
