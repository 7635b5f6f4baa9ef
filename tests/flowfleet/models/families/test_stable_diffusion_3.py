"""The Stable Diffusion 3 adapter against diffusers' own `StableDiffusion3Pipeline` on tiny random checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from PIL import Image

from flowfleet.conformance.models import RAGGED, SEEDS, generators, sample_ode
from flowfleet.models.families.stable_diffusion_3 import StableDiffusion3Adapter
from flowfleet.models.registry import adapter_for
from flowfleet.models.schedules import flow_match_schedule, scheduler_levels
from flowfleet.models.settings import Guidance, Size
from tests.flowfleet.models import parity
from tests.tiny_models import make_tiny
from tests.tiny_models.stable_diffusion_3 import make_tiny_stable_diffusion_3

SQUARE = Size(64, 64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("stable_diffusion_3", tmp_path_factory.mktemp("models") / "sd3")


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> StableDiffusion3Adapter:
    return StableDiffusion3Adapter.load(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> Any:
    return load_pipeline(checkpoint)


def load_pipeline(path: Path, **options: None) -> Any:
    pipeline_class: Any = StableDiffusion3Pipeline
    pipeline = pipeline_class.from_pretrained(str(path), **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def assert_sampling_equals(adapter: StableDiffusion3Adapter, pipeline: Any, size: Size, scale: float) -> None:
    latents = sample_ode(adapter, adapter.encode(RAGGED), size, 3, Guidance(scale), adapter.encode([""]))
    arguments = {"height": size.height, "width": size.width, "num_inference_steps": 3, "guidance_scale": scale}
    expected = pipeline(RAGGED, generator=generators(), output_type="latent", **arguments).images
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    if size != SQUARE:
        pictures = pipeline(RAGGED, generator=generators(), output_type="np", **arguments).images
        parity.assert_same_pictures(adapter.decode(latents, size), pictures)


@pytest.mark.parametrize("scale", [1.0, 4.5])
@pytest.mark.parametrize("size", [SQUARE, Size(32, 96)])
def test_sampling_equals_the_pipeline(
    adapter: StableDiffusion3Adapter, pipeline: Any, size: Size, scale: float
) -> None:
    assert_sampling_equals(adapter, pipeline, size, scale)


def test_a_checkpoint_without_t5_works_as_the_pipeline_does(tmp_path: Path) -> None:
    path = make_tiny_stable_diffusion_3(tmp_path, t5=False)
    adapter = StableDiffusion3Adapter.load(path, dtype=torch.float32)
    assert adapter.pipeline.text_encoder_3 is None
    pipeline = load_pipeline(path, text_encoder_3=None, tokenizer_3=None)
    assert_sampling_equals(adapter, pipeline, SQUARE, 4.5)
    encoder = StableDiffusion3Adapter.load(path, dtype=torch.float32, components=("text_encoder",))
    with pytest.raises(ValueError, match="component transformer"):
        encoder.encode(["a"])


@pytest.mark.parametrize(("size", "steps"), [(SQUARE, 1), (Size(256, 128), 10), (Size(32, 96), 28)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_schedule_is_the_pipelines_bit_for_bit(checkpoint: Path, size: Size, steps: int, dynamic: bool) -> None:
    pipeline = load_pipeline(checkpoint)
    adapter = StableDiffusion3Adapter.load(checkpoint, dtype=torch.float32, components=("transformer",))
    if dynamic:
        scheduler_class: Any = FlowMatchEulerDiscreteScheduler
        for one in (pipeline, adapter.pipeline):
            one.scheduler = scheduler_class.from_config(one.scheduler.config, use_dynamic_shifting=True)
    parity.assert_schedule_is_the_pipelines(adapter, pipeline, size, steps)


@pytest.mark.parametrize("num_steps", [1, 2, 10, 40])
def test_static_shift_matches_the_formula_in_float64(num_steps: int) -> None:
    def shift(sigma: Any) -> Any:
        return 3 * sigma / (1 + 2 * sigma)

    schedule = flow_match_schedule({"shift": 3.0}, num_steps, 1, levels=scheduler_levels)
    expected = np.append(shift(np.linspace(1, shift(1 / 1000), num_steps)), 0.0)
    np.testing.assert_allclose(schedule.sigmas, expected, rtol=1e-6)
    assert torch.equal(schedule.timesteps, schedule.sigmas[:-1] * 1000)


@pytest.mark.parametrize("size", [SQUARE, Size(48, 112)])
def test_sampling_starts_where_the_pipeline_does(adapter: StableDiffusion3Adapter, pipeline: Any, size: Size) -> None:
    latents = adapter.initial_latents(SEEDS, size)
    assert latents.shape == (3, 16, size.height // 8, size.width // 8)
    assert torch.equal(latents, parity.initial_latents_of(pipeline, size))


def test_encoding_equals_the_pipelines(adapter: StableDiffusion3Adapter, pipeline: Any) -> None:
    encoded = adapter.encode(RAGGED)
    with torch.no_grad():
        embeds, _, pooled, _ = pipeline.encode_prompt(RAGGED, None, None, do_classifier_free_guidance=False)
    assert torch.equal(encoded.embeds, embeds)
    assert torch.equal(encoded.extras["pooled"], pooled)
    assert encoded.embeds.shape == (3, 77 + 256, 48)
    assert not encoded.embeds[:, :77, 16 + 24 :].any()
    assert not encoded.has_padding
    parity.assert_extras_survive(encoded, "pooled")


def test_prompts_make_a_difference(adapter: StableDiffusion3Adapter) -> None:
    parity.assert_prompts_and_their_extras_make_a_difference(adapter, SQUARE)


def test_rows_do_not_depend_on_their_batch(adapter: StableDiffusion3Adapter) -> None:
    parity.assert_rows_do_not_depend_on_their_batch(adapter, Size(64, 32), [900.0, 20.0, 500.0])


@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_gradients_flow(adapter: StableDiffusion3Adapter, scale: float) -> None:
    parity.assert_gradients_flow(adapter, SQUARE, Guidance(scale))


def test_media_are_encoded_as_by_the_vae(adapter: StableDiffusion3Adapter, pipeline: Any) -> None:
    parity.assert_media_are_encoded_as_by_the_vae(adapter, pipeline.vae, Size(32, 64), lambda planes: planes)


def test_a_trainer_loads_the_transformer_alone(checkpoint: Path, adapter: StableDiffusion3Adapter) -> None:
    trainer = adapter_for(checkpoint).load(checkpoint, dtype=torch.float32, components=("transformer",))
    assert isinstance(trainer, StableDiffusion3Adapter)
    parity.assert_trains_alone(trainer, adapter, Size(64, 96))
    parity.assert_lora_fits(trainer)


def test_computes_in_bfloat16(checkpoint: Path) -> None:
    adapter = StableDiffusion3Adapter.load(checkpoint, dtype=torch.bfloat16)
    parity.assert_computes_in(adapter, torch.bfloat16, SQUARE)


def test_wrong_sizes_and_inputs_are_refused(adapter: StableDiffusion3Adapter) -> None:
    parity.assert_wrong_sizes_are_refused(adapter)
    with pytest.raises(ValueError, match="at most 256 pixels a side"):
        adapter.latent_shape(Size(272, 64))
    with pytest.raises(ValueError, match="no condition images"):
        adapter.encode(["a"], images=[[Image.new("RGB", (8, 8))]])
    with pytest.raises(ValueError, match="needs negative"):
        sample_ode(adapter, adapter.encode(RAGGED), SQUARE, 1, Guidance(2.0))
