"""The Chroma adapter against diffusers' own `ChromaPipeline` on a tiny random checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ChromaPipeline

from flowfleet.conformance.models import RAGGED, SEEDS, generators, sample_ode
from flowfleet.models.families.chroma import ChromaAdapter
from flowfleet.models.packing import pack
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Guidance, Size
from tests.flowfleet.models import parity
from tests.tiny_models import make_tiny

SQUARE = Size(64, 64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("chroma", tmp_path_factory.mktemp("models") / "chroma")


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> ChromaAdapter:
    return ChromaAdapter.load(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> Any:
    pipeline_class: Any = ChromaPipeline
    pipeline = pipeline_class.from_pretrained(str(checkpoint))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("size", [SQUARE, Size(32, 96)])
def test_sampling_equals_the_pipeline(adapter: ChromaAdapter, pipeline: Any, size: Size, scale: float) -> None:
    latents = sample_ode(adapter, adapter.encode(RAGGED), size, 3, Guidance(scale), adapter.encode(["a mess"]))
    shape = {"height": size.height, "width": size.width, "num_inference_steps": 3}
    guidance = {"guidance_scale": scale, "negative_prompt": ["a mess"] * len(RAGGED)}
    expected = pipeline(RAGGED, generator=generators(), output_type="latent", **shape, **guidance).images
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    if size != SQUARE:
        pictures = pipeline(RAGGED, generator=generators(), output_type="np", **shape, **guidance).images
        parity.assert_same_pictures(adapter.decode(latents, size), pictures)


def test_start_and_schedule_are_the_pipelines(adapter: ChromaAdapter, pipeline: Any) -> None:
    parity.assert_schedule_is_the_pipelines(adapter, pipeline, Size(512, 256), 10)
    assert torch.equal(
        adapter.initial_latents(SEEDS, Size(48, 112)), parity.initial_latents_of(pipeline, Size(48, 112))
    )


def test_padding_but_its_first_token_is_told_apart(adapter: ChromaAdapter) -> None:
    encoded = adapter.encode(RAGGED)
    lengths = [len(adapter.pipeline.tokenizer(prompt).input_ids) + 1 for prompt in RAGGED]
    assert encoded.extras["attention"].sum(1).tolist() == lengths
    assert not encoded.has_padding
    parity.assert_extras_survive(encoded, "attention")
    parity.assert_prompts_and_their_extras_make_a_difference(adapter, SQUARE)


def test_rows_do_not_depend_on_their_batch(adapter: ChromaAdapter) -> None:
    parity.assert_rows_do_not_depend_on_their_batch(adapter, Size(64, 32), [900.0, 20.0, 500.0])


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_gradients_flow(adapter: ChromaAdapter, scale: float) -> None:
    parity.assert_gradients_flow(adapter, SQUARE, Guidance(scale))


def test_media_are_encoded_as_by_the_vae(adapter: ChromaAdapter, pipeline: Any) -> None:
    parity.assert_media_are_encoded_as_by_the_vae(adapter, pipeline.vae, Size(32, 64), pack)


def test_a_trainer_loads_the_transformer_alone(checkpoint: Path, adapter: ChromaAdapter) -> None:
    trainer = adapter_for(checkpoint).load(checkpoint, dtype=torch.float32, components=("transformer",))
    assert isinstance(trainer, ChromaAdapter)
    parity.assert_trains_alone(trainer, adapter, Size(64, 96))
    parity.assert_lora_fits(trainer)


def test_computes_in_bfloat16(checkpoint: Path) -> None:
    parity.assert_computes_in(ChromaAdapter.load(checkpoint, dtype=torch.bfloat16), torch.bfloat16, SQUARE)


def test_wrong_sizes_and_inputs_are_refused(adapter: ChromaAdapter) -> None:
    parity.assert_wrong_sizes_are_refused(adapter)
    with pytest.raises(ValueError, match=r"leave rollout\.embedded_guidance out"):
        sample_ode(adapter, adapter.encode(RAGGED), SQUARE, 1, Guidance(embedded=3.5))
