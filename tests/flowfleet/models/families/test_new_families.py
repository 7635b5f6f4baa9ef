"""Rules of single families that the others do not have."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxKontextPipeline
from PIL import Image

from flowfleet.conformance.models import RAGGED, sample_ode
from flowfleet.models.families.flux2_klein import Flux2KleinAdapter
from flowfleet.models.families.flux_kontext import FluxKontextAdapter
from flowfleet.models.families.krea2 import Krea2Adapter
from flowfleet.models.families.sana import SanaAdapter
from flowfleet.models.settings import Guidance, Size
from tests.tiny_models import make_tiny
from tests.tiny_models.flux2_klein import make_tiny_flux2_klein
from tests.tiny_models.krea2 import make_tiny_krea2

SQUARE = Size(64, 64)


def test_a_distilled_klein_ignores_guidance_as_its_pipeline_does(tmp_path: Path) -> None:
    adapter = Flux2KleinAdapter.load(make_tiny_flux2_klein(tmp_path, is_distilled=True), dtype=torch.float32)
    prompts, negative = adapter.encode(RAGGED), adapter.encode(["a mess"])
    latents, unguided = (sample_ode(adapter, prompts, SQUARE, 2, Guidance(scale), negative) for scale in (4.0, 1.0))
    assert torch.equal(latents, unguided)
    assert not Flux2KleinAdapter.load(tmp_path, dtype=torch.float32, components=("transformer",)).takes_guidance


def test_klein_shrinks_large_condition_images_and_keeps_small_ones(tmp_path: Path) -> None:
    adapter = Flux2KleinAdapter.load(make_tiny_flux2_klein(tmp_path), dtype=torch.float32)
    adapter.resize_conditions(64 * 64)
    images = [Image.new("RGB", (32, 48)), Image.new("L", (300, 100)), Image.new("RGBA", (100, 100))]
    encoded = adapter.encode(["a"], images=[images])
    grids = [tuple(encoded.extras[f"image_{number}"].shape[1:3]) for number in (1, 2, 3)]
    assert grids == [(3, 2), (2, 6), (4, 4)]  # 300 x 100 becomes 110 x 36, of which 96 x 32 are whole tokens
    with pytest.raises(ValueError, match="too narrow"):
        adapter.encode(["a"], images=[[Image.new("RGB", (2000, 10))]])
    with pytest.raises(ValueError, match="0 to 8 condition images a prompt, but one has 9"):
        adapter.encode(["a"], images=[images[:1] * 9])


def test_a_distilled_krea2_has_one_shift_for_all_sizes(tmp_path: Path) -> None:
    adapter = Krea2Adapter.load(make_tiny_krea2(tmp_path, is_distilled=True), dtype=torch.float32, components=())
    base = Krea2Adapter.load(make_tiny_krea2(tmp_path / "base"), dtype=torch.float32, components=())
    small, large = (adapter.schedule(8, Size(side, side)).sigmas for side in (256, 1024))
    assert torch.equal(small, large)
    assert not torch.equal(base.schedule(8, Size(256, 256)).sigmas, base.schedule(8, Size(1024, 1024)).sigmas)


def test_sanas_levels_are_its_schedulers(tmp_path: Path) -> None:
    adapter = SanaAdapter.load(make_tiny("sana", tmp_path), dtype=torch.float32, components=())
    scheduler: Any = adapter.pipeline.scheduler
    scheduler.set_timesteps(20)
    assert (adapter.schedule(20, SQUARE).sigmas - scheduler.sigmas).abs().max() < 5e-3


def test_sanas_prompts_have_their_own_length(tmp_path: Path) -> None:
    adapter = SanaAdapter.load(make_tiny("sana", tmp_path), dtype=torch.float32)
    encoded, short = adapter.encode(RAGGED), adapter.encode_negative(["a"])
    assert encoded.has_padding
    assert encoded.embeds.shape[1] == int(encoded.mask.sum(1).max()) < 300
    assert short.embeds.shape[1] < 10


@pytest.mark.parametrize("sides", [(640, 480), (1000, 300)])
def test_kontext_brings_images_to_one_of_its_own_sizes(sides: tuple[int, int], tmp_path: Path) -> None:
    checkpoint = make_tiny("flux_kontext", tmp_path)
    adapter = FluxKontextAdapter.load(checkpoint, dtype=torch.float32)
    picture = Image.linear_gradient("L").convert("RGB").resize(sides)
    pipeline: Any = FluxKontextPipeline.from_pretrained(str(checkpoint))
    seen: list[Any] = []
    encode = pipeline._encode_vae_image

    def keep(image: Any, generator: Any) -> Any:
        seen.append(encode(image, generator))
        return seen[-1]

    pipeline._encode_vae_image = keep
    pipeline.set_progress_bar_config(disable=True)
    pipeline(image=picture, prompt="a", height=32, width=32, max_area=1024, num_inference_steps=1, output_type="latent")
    condition = adapter.encode(["a"], images=[[picture]]).extras["image_1"]
    assert condition.shape[1:3] == (seen[0].shape[2] // 2, seen[0].shape[3] // 2)
