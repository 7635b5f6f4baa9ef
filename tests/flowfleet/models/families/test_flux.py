"""The FLUX adapter against diffusers' own `FluxPipeline` on tiny random checkpoints of both kinds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image

from flowfleet.conformance.models import RAGGED, SEEDS, generators, sample_ode
from flowfleet.models.families.flux import FluxAdapter, position_ids
from flowfleet.models.packing import pack, unpack
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Guidance, Size
from tests.flowfleet.models import parity
from tests.tiny_models import make_tiny

SQUARE = Size(64, 64)


@pytest.fixture(scope="module", params=["flux", "flux_distilled"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> FluxAdapter:
    return FluxAdapter.load(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> Any:
    pipeline_class: Any = FluxPipeline
    pipeline = pipeline_class.from_pretrained(str(checkpoint))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize(("size", "embedded"), [(SQUARE, None), (Size(32, 96), 6.0)])
def test_sampling_equals_the_pipeline(
    adapter: FluxAdapter, pipeline: Any, size: Size, scale: float, embedded: float | None
) -> None:
    arguments: dict[str, Any] = {"height": size.height, "width": size.width, "num_inference_steps": 3}
    if not adapter.transformer.config.guidance_embeds:
        embedded = None
    elif embedded is not None:
        arguments["guidance_scale"] = embedded
    if scale > 1:
        arguments |= {"true_cfg_scale": scale, "negative_prompt": [""] * len(RAGGED)}
    guidance = Guidance(scale, embedded)
    latents = sample_ode(adapter, adapter.encode(RAGGED), size, 3, guidance, adapter.encode([""]))
    expected = pipeline(RAGGED, generator=generators(), output_type="latent", **arguments).images
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    if size != SQUARE:
        pictures = pipeline(RAGGED, generator=generators(), output_type="np", **arguments).images
        parity.assert_same_pictures(adapter.decode(latents, size), pictures)


def test_embedded_guidance_is_an_input_of_distilled_checkpoints_alone(adapter: FluxAdapter) -> None:
    prompts, latents = adapter.encode(RAGGED), adapter.initial_latents(SEEDS, SQUARE)

    def velocity(embedded: float | None) -> torch.Tensor:
        with torch.no_grad():
            return adapter.velocity(
                latents, torch.tensor(500.0), prompts, size=SQUARE, guidance=Guidance(embedded=embedded)
            )

    if adapter.transformer.config.guidance_embeds:
        assert torch.equal(velocity(None), velocity(3.5))
        assert (velocity(1.0) - velocity(3.5)).abs().max() > 1e-3
    else:
        with pytest.raises(ValueError, match=r"leave rollout\.embedded_guidance out"):
            velocity(3.5)


@pytest.mark.parametrize(("size", "steps"), [(SQUARE, 1), (Size(512, 512), 10), (Size(32, 256), 28)])
def test_schedule_is_the_pipelines_bit_for_bit(adapter: FluxAdapter, pipeline: Any, size: Size, steps: int) -> None:
    parity.assert_schedule_is_the_pipelines(adapter, pipeline, size, steps)


@pytest.mark.parametrize("size", [SQUARE, Size(48, 112)])
def test_sampling_starts_where_the_pipeline_does(adapter: FluxAdapter, pipeline: Any, size: Size) -> None:
    latents = adapter.initial_latents(SEEDS, size)
    assert latents.shape == (3, size.height * size.width // 16**2, 64)
    assert torch.equal(latents, parity.initial_latents_of(pipeline, size))


def test_encoding_equals_the_pipelines(adapter: FluxAdapter, pipeline: Any) -> None:
    encoded = adapter.encode(RAGGED)
    with torch.no_grad():
        embeds, pooled, _ = pipeline.encode_prompt(RAGGED)
    assert torch.equal(encoded.embeds, embeds)
    assert torch.equal(encoded.extras["pooled"], pooled)
    assert encoded.embeds.shape == (3, 512, 32)
    assert not encoded.has_padding
    parity.assert_extras_survive(encoded, "pooled")


def test_packing_and_positions_are_the_pipelines() -> None:
    planes = torch.randn(2, 16, 6, 10)
    tokens = pack(planes)
    assert torch.equal(tokens, FluxPipeline._pack_latents(planes, 2, 16, 6, 10))
    assert torch.equal(unpack(tokens, 3, 5), planes)
    expected = FluxPipeline._prepare_latent_image_ids(1, 3, 5, "cpu", torch.float32)
    assert torch.equal(position_ids(3, 5), expected)


def test_prompts_make_a_difference(adapter: FluxAdapter) -> None:
    parity.assert_prompts_and_their_extras_make_a_difference(adapter, SQUARE)


def test_rows_do_not_depend_on_their_batch(adapter: FluxAdapter) -> None:
    parity.assert_rows_do_not_depend_on_their_batch(adapter, Size(64, 32), [900.0, 20.0, 500.0])


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_gradients_flow(adapter: FluxAdapter, scale: float) -> None:
    parity.assert_gradients_flow(adapter, SQUARE, Guidance(scale))


def test_media_are_encoded_as_by_the_vae(adapter: FluxAdapter, pipeline: Any) -> None:
    parity.assert_media_are_encoded_as_by_the_vae(adapter, pipeline.vae, Size(32, 64), pack)


def test_a_trainer_loads_the_transformer_alone(checkpoint: Path, adapter: FluxAdapter) -> None:
    trainer = adapter_for(checkpoint).load(checkpoint, dtype=torch.float32, components=("transformer",))
    assert isinstance(trainer, FluxAdapter)
    parity.assert_trains_alone(trainer, adapter, Size(64, 96))
    parity.assert_lora_fits(trainer)


def test_computes_in_bfloat16(checkpoint: Path) -> None:
    parity.assert_computes_in(FluxAdapter.load(checkpoint, dtype=torch.bfloat16), torch.bfloat16, SQUARE)


def test_wrong_sizes_and_inputs_are_refused(adapter: FluxAdapter) -> None:
    parity.assert_wrong_sizes_are_refused(adapter)
    with pytest.raises(ValueError, match="no condition images"):
        adapter.encode(["a"], images=[[Image.new("RGB", (8, 8))]])
    with pytest.raises(ValueError, match="needs negative"):
        sample_ode(adapter, adapter.encode(RAGGED), SQUARE, 1, Guidance(2.0))
