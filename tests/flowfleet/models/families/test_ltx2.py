"""LTX-2's films with sound, held to diffusers' own pipelines on a tiny random checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTX2ImageToVideoPipeline, LTX2Pipeline
from PIL import Image
from torch import Tensor

from flowfleet.conformance.models import RAGGED, SEEDS, check_model, generators, sample_ode
from flowfleet.models.families.ltx2 import LTX2Adapter
from flowfleet.models.settings import Guidance, Size
from tests.tiny_models import make_tiny

STEPS = 3
NEGATIVE = "a mess"
FILM = Size(64, 32, 9)
PLAIN = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
"""Without the pipelines' further guidance, of the picture and of the sound."""
PLAIN |= {f"audio_{name}": value for name, value in PLAIN.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("ltx2", tmp_path_factory.mktemp("models") / "ltx2")


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> LTX2Adapter:
    adapter = LTX2Adapter.load(checkpoint, dtype=torch.float32)
    adapter.size_conditions(FILM)
    return adapter


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 50, 3), dtype=np.uint8))


def run(kind: Any, checkpoint: Path, scale: float, output: str) -> list[Any]:
    """A pipeline's answers, prompt by prompt."""
    pipeline = kind.from_pretrained(str(checkpoint))
    pipeline.set_progress_bar_config(disable=True)
    given = {"height": FILM.height, "width": FILM.width, "num_frames": FILM.num_frames, "output_type": output}
    given |= {"num_inference_steps": STEPS, "guidance_scale": scale, "audio_guidance_scale": scale, **PLAIN}
    given |= {"image": picture()} if kind is LTX2ImageToVideoPipeline else {}
    return [
        pipeline(prompt=[prompt], negative_prompt=[NEGATIVE], generator=[generator], **given)
        for prompt, generator in zip(RAGGED, generators(), strict=True)
    ]


def flat(made: Any, adapter: LTX2Adapter, clean: int) -> Tensor:
    """A pipeline's denormalized latents as the adapter has them."""
    vae, sound_vae = adapter.pipeline.vae, adapter.pipeline.audio_vae
    frames = LTX2Pipeline._normalize_latents(made.frames, vae.latents_mean, vae.latents_std)[:, :, clean:]
    packed = LTX2Pipeline._pack_audio_latents(made.audio)
    sound = LTX2Pipeline._normalize_audio_latents(packed, sound_vae.latents_mean, sound_vae.latents_std)
    return torch.cat([LTX2Pipeline._pack_latents(frames).flatten(1), sound.flatten(1)], 1)


@pytest.mark.parametrize(("scale", "clean"), [(1.0, 0), (3.0, 0), (1.0, 1), (3.0, 1)])
def test_samples_equal_the_pipelines(adapter: LTX2Adapter, checkpoint: Path, scale: float, clean: int) -> None:
    size = Size(FILM.height, FILM.width, FILM.num_frames, clean)
    images = [[picture()]] * len(RAGGED) if clean else None
    prompts, negative = (adapter.encode(texts, images=images) for texts in (RAGGED, [NEGATIVE] * len(RAGGED)))
    latents = sample_ode(adapter, prompts, size, STEPS, Guidance(scale), negative)
    kind = LTX2ImageToVideoPipeline if clean else LTX2Pipeline
    expected = torch.cat([flat(made, adapter, clean) for made in run(kind, checkpoint, scale, "latent")])
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    if scale > 1:
        return
    drawn = run(kind, checkpoint, scale, "np")
    films = np.concatenate([(made.frames * 255).round() for made in drawn])
    assert np.abs(adapter.decode(latents, size, prompts).numpy().astype(int) - films).max() <= 1
    sounds, rate = adapter.decode_sound(latents, size)
    torch.testing.assert_close(sounds, torch.cat([made.audio for made in drawn]), rtol=0, atol=1e-5)
    assert abs(sounds.shape[-1] / rate - FILM.num_frames / adapter.fps) < 0.05


def test_check_model_passes(checkpoint: Path) -> None:
    assert {(str(result.status), result.detail) for result in check_model(str(checkpoint))} == {("pass", "")}


def test_a_trainer_loads_the_transformer_alone(checkpoint: Path, adapter: LTX2Adapter) -> None:
    trainer = LTX2Adapter.load(checkpoint, dtype=torch.float32, components=("transformer",))
    prompts, latents = adapter.encode(RAGGED), adapter.initial_latents(SEEDS, FILM)
    velocities = [one.velocity(latents, torch.tensor(300.0), prompts, size=FILM) for one in (trainer, adapter)]
    assert torch.equal(*velocities)
    blank = trainer.blank_prompts(2, 5)
    assert blank.embeds.shape[1:] == prompts.embeds.shape[1:]
    assert blank.extras["sound"].shape[1:] == prompts.extras["sound"].shape[1:]


def test_what_cannot_be_is_refused(adapter: LTX2Adapter) -> None:
    with pytest.raises(ValueError, match="at least 9 frames"):
        adapter.latent_shape(Size(64, 32))
    with pytest.raises(ValueError, match="1 more than a multiple of 8"):
        adapter.latent_shape(Size(64, 32, 13))
    with pytest.raises(ValueError, match="a multiple of 8, the connectors' registers"):
        adapter.limit_tokens(20)
    clean = Size(64, 32, 9, 1)
    latents, prompts = adapter.initial_latents([1], clean), adapter.encode(["a"])
    with pytest.raises(ValueError, match="no first frame"):
        adapter.velocity(latents, torch.tensor(5.0), prompts, size=clean)
    with pytest.raises(ValueError, match="films are read without"):
        adapter.encode_media(torch.zeros(1, 9, 64, 32, 3, dtype=torch.uint8), FILM)
