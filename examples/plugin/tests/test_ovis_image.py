"""The Ovis-Image adapter against diffusers' own pipeline on a tiny random checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import OvisImagePipeline
from tiny_ovis_image import make_tiny_ovis_image

from flowfleet.conformance.models import RAGGED, SEEDS, generators, sample_ode
from flowfleet.models.packing import pack
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Guidance, Size
from flowfleet_example.ovis_image import OvisImageAdapter
from tests.flowfleet.models import parity

SQUARE, WIDE = Size(64, 64), Size(32, 96)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_ovis_image(tmp_path_factory.mktemp("models") / "ovis_image")


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> OvisImageAdapter:
    return OvisImageAdapter.load(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> Any:
    pipeline_class: Any = OvisImagePipeline
    pipeline = pipeline_class.from_pretrained(str(checkpoint))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize(("size", "scale"), [(SQUARE, 1.0), (WIDE, 5.0)])
def test_sampling_equals_the_pipeline(adapter: OvisImageAdapter, pipeline: Any, size: Size, scale: float) -> None:
    latents = sample_ode(adapter, adapter.encode(RAGGED), size, 3, Guidance(scale), adapter.encode(["a mess"]))
    arguments: dict[str, Any] = {
        "height": size.height,
        "width": size.width,
        "num_inference_steps": 3,
        "guidance_scale": scale,
    }
    arguments |= {"negative_prompt": ["a mess"] * len(RAGGED)}
    expected = pipeline(RAGGED, generator=generators(), output_type="latent", **arguments).images
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    pictures = pipeline(RAGGED, generator=generators(), output_type="np", **arguments).images
    parity.assert_same_pictures(adapter.decode(latents, size), pictures)


def test_start_and_schedule_are_the_pipelines(adapter: OvisImageAdapter, pipeline: Any) -> None:
    parity.assert_schedule_is_the_pipelines(adapter, pipeline, Size(512, 256), 10)
    assert torch.equal(adapter.initial_latents(SEEDS, WIDE), parity.initial_latents_of(pipeline, WIDE))


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_the_trainers_ratio_is_exactly_one(adapter: OvisImageAdapter, scale: float) -> None:
    parity.assert_ratio_is_exactly_one(adapter, WIDE, "sit_sde", Guidance(scale))


def test_prompts_count_and_batches_do_not(adapter: OvisImageAdapter) -> None:
    parity.assert_prompts_and_their_extras_make_a_difference(adapter, SQUARE)
    parity.assert_rows_do_not_depend_on_their_batch(adapter, WIDE, [900.0, 20.0, 500.0])
    parity.assert_gradients_flow(adapter, WIDE, Guidance(5.0))


def test_media_are_encoded_as_by_the_vae(adapter: OvisImageAdapter, pipeline: Any) -> None:
    parity.assert_media_are_encoded_as_by_the_vae(adapter, pipeline.vae, WIDE, pack)


def test_a_trainer_loads_the_transformer_alone(checkpoint: Path, adapter: OvisImageAdapter) -> None:
    trainer = adapter_for(checkpoint).load(checkpoint, dtype=torch.float32, components=("transformer",))
    assert isinstance(trainer, OvisImageAdapter)
    parity.assert_trains_alone(trainer, adapter, WIDE)
    parity.assert_lora_fits(trainer)


def test_computes_in_bfloat16(checkpoint: Path) -> None:
    parity.assert_computes_in(OvisImageAdapter.load(checkpoint, dtype=torch.bfloat16), torch.bfloat16, SQUARE)


def test_wrong_sizes_and_inputs_are_refused(adapter: OvisImageAdapter) -> None:
    parity.assert_wrong_sizes_are_refused(adapter)
    with pytest.raises(ValueError, match=r"leave rollout\.embedded_guidance out"):
        sample_ode(adapter, adapter.encode(RAGGED), SQUARE, 1, Guidance(embedded=3.5))
