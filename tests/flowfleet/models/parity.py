"""What every family's adapter is held to: diffusers' own pipeline on the same checkpoint, seeds and prompts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flowfleet.algorithms.sde import StepResult, reverse_step
from flowfleet.conformance.models import RAGGED, SEEDS, generators, sample_ode
from flowfleet.models.base import ModelAdapter
from flowfleet.models.embeds import PromptEmbeds, concat_embeds
from flowfleet.models.settings import Guidance, Size
from flowfleet.proto.rollout_pb2 import LoraSpec
from flowfleet.weights.lora import install_lora


def assert_same_pictures(frames: Tensor, expected: np.ndarray[Any, Any]) -> None:
    """`frames` (B, 1, H, W, 3) uint8 against the pipeline's pictures (B, H, W, 3) in [0, 1]."""
    assert frames.shape == (len(expected), 1, *expected.shape[1:])
    levels = np.abs(frames[:, 0].numpy().astype(int) - (expected * 255).round().astype(int))
    assert levels.max() <= 1
    assert (levels > 0).mean() < 1e-3  # where a value lies on the edge between two levels


def assert_schedule_is_the_pipelines(adapter: ModelAdapter, pipeline: Any, size: Size, steps: int) -> None:
    """Runs the pipeline with an idle transformer and compares bits."""
    pipeline.transformer.forward, forward = lambda hidden_states, **_: (hidden_states,), pipeline.transformer.forward
    pipeline("a", height=size.height, width=size.width, num_inference_steps=steps, output_type="latent")
    pipeline.transformer.forward = forward
    schedule = adapter.schedule(steps, size)
    assert torch.equal(schedule.sigmas, pipeline.scheduler.sigmas)
    assert torch.equal(schedule.timesteps, pipeline.scheduler.timesteps)


def initial_latents_of(pipeline: Any, size: Size) -> Tensor:
    """What the pipeline starts from with SEEDS: an idle transformer's velocity of zero leaves it as it is."""
    pipeline.transformer.forward, forward = (
        (lambda hidden_states, **_: (0 * hidden_states,)),
        pipeline.transformer.forward,
    )
    latents: Tensor = pipeline(
        RAGGED,
        height=size.height,
        width=size.width,
        num_inference_steps=1,
        generator=generators(),
        output_type="latent",
    ).images
    pipeline.transformer.forward = forward
    return latents


def assert_rows_do_not_depend_on_their_batch(adapter: ModelAdapter, size: Size, timesteps: Sequence[float]) -> None:
    prompts, latents = adapter.encode(RAGGED), adapter.initial_latents(SEEDS, size)
    with torch.no_grad():
        together = adapter.velocity(latents, torch.tensor(timesteps), prompts, size=size)
        for row, timestep in enumerate(timesteps):
            alone = adapter.velocity(
                latents[row : row + 1], torch.tensor(timestep), adapter.encode([RAGGED[row]]), size=size
            )
            torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-6)
    assert torch.equal(adapter.initial_latents(SEEDS[1:2], size)[0], latents[1])


def assert_prompts_and_their_extras_make_a_difference(
    adapter: ModelAdapter, size: Size, *, floor: float = 1e-3
) -> None:
    """Token embeddings and extras, together and each alone, change the velocity by `floor` of its deviation."""
    prompts, latents = adapter.encode(RAGGED[:2]), adapter.initial_latents(SEEDS[:1] * 2, size)
    crossed = PromptEmbeds(prompts.embeds, prompts.mask, {name: x.flip(0) for name, x in prompts.extras.items()})

    def velocity(prompts: PromptEmbeds) -> Tensor:
        with torch.no_grad():
            return adapter.velocity(latents, torch.tensor(500.0), prompts, size=size)

    straight, mixed = velocity(prompts), velocity(crossed)
    pairs = [(straight[0], straight[1])]
    if prompts.extras:
        pairs += [(straight[0], mixed[0]), (straight[0], mixed[1])]
    changes = [float((a - b).abs().mean() / straight.std()) for a, b in pairs]
    assert min(changes) > floor, changes


def assert_gradients_flow(adapter: ModelAdapter, size: Size, guidance: Guidance) -> None:
    """The velocity has the bits that it has without gradients, and reaches most parameters."""
    prompts, negative, latents = adapter.encode(RAGGED), adapter.encode([""]), adapter.initial_latents(SEEDS, size)

    def velocity() -> Tensor:
        return adapter.velocity(latents, torch.tensor(700.0), prompts, size=size, guidance=guidance, negative=negative)

    with torch.no_grad():
        frozen = velocity()
    adapter.transformer.requires_grad_(True)
    trained = velocity()
    assert torch.equal(trained.detach(), frozen)
    trained.square().sum().backward()  # type: ignore[no-untyped-call]
    assert_most_have_gradients(adapter)


def assert_ratio_is_exactly_one(adapter: ModelAdapter, size: Size, step: str, guidance: Guidance) -> None:
    """Rollout without gradients and with noise, trainer with gradients and stored samples: the same log-probs in bits.

    `step` is a step type's name; the log-probs' gradient must reach most parameters.
    """
    schedule, prompts, negative = adapter.schedule(6, size), adapter.encode(RAGGED), adapter.encode([" "])

    def result_of(latents: Tensor, i: int, **sample: Tensor) -> StepResult:
        velocity = adapter.velocity(
            latents, schedule.timesteps[i], prompts, size=size, guidance=guidance, negative=negative
        )
        sigmas = schedule.sigmas[i : i + 2]
        return reverse_step(step)(latents, velocity, *sigmas, eta=0.7, sigma_max=schedule.sigma_max, **sample)

    latents, stored = adapter.initial_latents(SEEDS, size), []
    for i in range(3):
        with torch.no_grad():
            rollout = result_of(latents, i, noise=adapter.step_noise(SEEDS, i, latents.shape[1:]))
        stored.append((latents, rollout))
        latents = rollout.prev_sample
    adapter.transformer.requires_grad_(True)
    for i, (latents, rollout) in enumerate(stored):
        trainer = result_of(latents, i, prev_sample=rollout.prev_sample)
        assert torch.equal((trainer.log_prob - rollout.log_prob).exp().detach(), torch.ones(len(SEEDS)))
        trainer.log_prob.sum().backward()  # type: ignore[no-untyped-call]
    assert_most_have_gradients(adapter)


def assert_most_have_gradients(adapter: ModelAdapter) -> None:
    """Most parameters of the transformer have a gradient; freezes it and drops them."""
    gradients = [parameter.grad for parameter in adapter.transformer.parameters()]
    adapter.transformer.requires_grad_(False).zero_grad()
    assert sum(gradient is not None and bool(gradient.abs().max() > 0) for gradient in gradients) > len(gradients) / 2


def assert_media_are_encoded_as_by_the_vae(
    adapter: ModelAdapter, vae: Any, size: Size, to_latents: Callable[[Tensor], Tensor]
) -> None:
    """`encode_media` against the VAE's own mode, shifted, scaled and brought `to_latents`; `decode` undoes the rest."""
    frames = torch.randint(0, 256, (2, 1, size.height, size.width, 3), dtype=torch.uint8)
    with torch.no_grad():
        mode = vae.encode(frames[:, 0].permute(0, 3, 1, 2).float() / 255 * 2 - 1).latent_dist.mode()
        again = vae.decode(mode).sample
    latents = adapter.encode_media(frames, size)
    expected = to_latents((mode - vae.config["shift_factor"]) * vae.config["scaling_factor"])
    torch.testing.assert_close(latents, expected, rtol=1e-5, atol=1e-6)
    assert latents.shape == (2, *adapter.latent_shape(size))
    pictures = (again / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    assert_same_pictures(adapter.decode(latents, size), pictures)
    with pytest.raises(ValueError, match="media must be uint8"):
        adapter.encode_media(frames.float(), size)


def assert_trains_alone(trainer: ModelAdapter, whole: ModelAdapter, size: Size) -> None:
    """Checks the transformer alone: the same schedule, shapes and velocity as with all components."""
    assert trainer.latent_shape(size) == whole.latent_shape(size)
    assert torch.equal(trainer.schedule(6, size).sigmas, whole.schedule(6, size).sigmas)
    prompts, latents = whole.encode(RAGGED), trainer.initial_latents(SEEDS, size)
    assert torch.equal(latents, whole.initial_latents(SEEDS, size))
    with torch.no_grad():
        velocities = [one.velocity(latents, torch.tensor(300.0), prompts, size=size) for one in (trainer, whole)]
    assert torch.equal(*velocities)
    frames = torch.zeros(1, 1, size.height, size.width, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="component text_encoder"):
        trainer.encode(["a"])
    with pytest.raises(ValueError, match="component vae"):
        trainer.decode(latents, size)
    with pytest.raises(ValueError, match="component vae"):
        trainer.encode_media(frames, size)


def assert_computes_in(adapter: ModelAdapter, dtype: torch.dtype, size: Size) -> None:
    """Weights and prompts in `dtype`, latents and velocities float32, pictures uint8."""
    assert {parameter.dtype for parameter in adapter.transformer.parameters()} == {dtype}
    prompts = adapter.encode(RAGGED)
    assert prompts.embeds.dtype == dtype
    latents = sample_ode(adapter, prompts, size, 2)
    assert latents.dtype == torch.float32
    assert latents.isfinite().all()
    assert adapter.decode(latents, size).shape == (3, 1, size.height, size.width, 3)


def assert_wrong_sizes_are_refused(adapter: ModelAdapter) -> None:
    for height, width in (60, 64), (64, 8), (0, 64), (-16, 64):
        with pytest.raises(ValueError, match="multiples of 16"):
            adapter.initial_latents([1], Size(height, width))
    for call in (adapter.latent_shape, lambda size: adapter.schedule(4, size)):
        with pytest.raises(ValueError, match="leave num_frames at 1"):
            call(Size(64, 64, num_frames=5))


def assert_lora_fits(adapter: ModelAdapter) -> None:
    """The family's targets can be adapted, in every block of a list at least in part; changes `adapter` for good."""
    names = install_lora(adapter.experts, LoraSpec(rank=2, alpha=4, target_modules=list(adapter.lora_targets)))
    for target in adapter.lora_targets:
        assert any(f".{target}.lora_A" in name for name in names)
    blocks = [name for name, module in adapter.transformer.named_children() if isinstance(module, nn.ModuleList)]
    for block in blocks:
        for i in range(len(getattr(adapter.transformer, block))):
            assert any(f".{block}.{i}.attn.to_q." in name for name in names)


def assert_extras_survive(prompts: PromptEmbeds, name: str) -> None:
    """Repeating, selecting, concatenating and moving keep each prompt's extra with it."""
    extra = prompts.extras[name]
    assert torch.equal(prompts.repeat(2).extras[name], extra.repeat_interleave(2, 0))
    assert torch.equal(prompts.select([2, 0]).extras[name], extra[[2, 0]])
    joined = concat_embeds([prompts.select([1]), prompts.select([2, 0])])
    assert torch.equal(joined.extras[name], extra[[1, 2, 0]])
    assert torch.equal(joined.embeds, prompts.embeds[[1, 2, 0]])
    assert torch.equal(prompts.to("cpu", torch.bfloat16).extras[name], extra)
