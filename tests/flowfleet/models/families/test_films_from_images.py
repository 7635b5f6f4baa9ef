"""Families that make videos from images, each held to diffusers' own pipeline on a tiny random checkpoint."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image
from torch import Tensor

from flowfleet.algorithms.sde import ode_step, reverse_step
from flowfleet.conformance.models import RAGGED, SEEDS, check_model, first_order, generators, sample_ode
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Guidance, Size
from flowfleet.models.video_vae import FIRST_FRAME, VideoAdapter
from tests.tiny_models import make_tiny

STEPS = 3
NEGATIVE = "a mess"
SQUARE = Size(64, 64, 9)


@dataclass(frozen=True)
class Family:
    pipeline_class: Any = None
    """The pipeline to compare with, if it is not the adapter's."""
    num_images: int = 1
    clean_frames: int = 0

    @property
    def size(self) -> Size:
        return Size(64, 64, 9, self.clean_frames)


FAMILIES = {
    "wan_5b": Family(WanImageToVideoPipeline, clean_frames=1),
    "wan_image": Family(),
    "hunyuan_video_15": Family(num_images=0),
    "hunyuan_video_15_image": Family(),
}


@pytest.fixture(scope="module", params=FAMILIES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def family(kind: str) -> Family:
    return FAMILIES[kind]


@pytest.fixture(scope="module")
def checkpoint(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(kind, tmp_path_factory.mktemp("models") / kind)


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, family: Family) -> VideoAdapter:
    adapter: Any = adapter_for(checkpoint).load(checkpoint, dtype=torch.float32)
    adapter.size_conditions(family.size)
    return adapter


@pytest.fixture(scope="module")
def pipeline(kind: str, checkpoint: Path, adapter: VideoAdapter, family: Family) -> Any:
    pipeline_class: Any = family.pipeline_class or adapter.pipeline_class
    pipeline = pipeline_class.from_pretrained(str(checkpoint), **dict.fromkeys(adapter.own_parts))
    adapter.complete(pipeline)
    if kind == "wan_5b":  # this pipeline wants ftfy
        pipeline._get_t5_prompt_embeds = partial(WanPipeline._get_t5_prompt_embeds, pipeline)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (50, 50, 3), dtype=np.uint8))


def encoded(adapter: VideoAdapter, texts: list[str], num_images: int) -> PromptEmbeds:
    shown = [picture(seed) for seed in range(num_images)]
    return adapter.encode(texts, images=[shown] * len(texts) if shown else None)


def run(pipeline: Any, adapter: VideoAdapter, family: Family, num_images: int, scale: float, output: str) -> Any:
    """The pipeline's latents or frames, in its schedule, which is the adapter's."""
    given: dict[str, Any] = {"height": SQUARE.height, "width": SQUARE.width, "guidance_scale": scale}
    if hasattr(pipeline, "guider"):
        pipeline.guider.guidance_scale = scale
        given = {} if num_images else {"height": SQUARE.height, "width": SQUARE.width}
    else:
        pipeline.scheduler = first_order(adapter.schedule(STEPS, family.size))
    given |= {name: picture(seed) for seed, name in enumerate(("image", "last_image")[:num_images])}
    given |= {"num_frames": SQUARE.num_frames, "num_inference_steps": STEPS, "output_type": output}
    rows = [
        pipeline(prompt=[prompt], negative_prompt=[NEGATIVE], generator=[generator], **given).frames
        for prompt, generator in zip(RAGGED, generators(), strict=True)
    ]
    return torch.cat(rows) if output == "latent" else np.concatenate(rows)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_samples_equal_the_pipelines(adapter: VideoAdapter, pipeline: Any, family: Family, scale: float) -> None:
    size, number = family.size, family.num_images
    prompts, negative = (encoded(adapter, texts, number) for texts in (RAGGED, [NEGATIVE] * len(RAGGED)))
    latents = sample_ode(adapter, prompts, size, STEPS, Guidance(scale), negative)
    expected = run(pipeline, adapter, family, number, scale, "latent")
    torch.testing.assert_close(latents, expected[:, :, size.clean_frames :], rtol=0, atol=1e-5)
    if scale == 1.0:
        drawn = run(pipeline, adapter, family, number, scale, "np")
        levels = np.abs(adapter.decode(latents, size, prompts).numpy().astype(int) - (drawn * 255).round())
        assert levels.max() <= 1
        assert (levels > 0).mean() < 1e-3


def test_rows_do_not_depend_on_their_batch_and_gradients_flow(adapter: VideoAdapter, family: Family) -> None:
    size, prompts = family.size, encoded(adapter, RAGGED, family.num_images)
    latents = adapter.initial_latents(SEEDS, size)
    timesteps = torch.tensor([500.0, 300.0, 700.0])
    with torch.no_grad():
        together = adapter.velocity(latents, timesteps, prompts, size=size)
        for row in range(len(RAGGED)):
            alone = encoded(adapter, [RAGGED[row]], family.num_images)
            velocity = adapter.velocity(latents[row : row + 1], timesteps[row], alone, size=size)
            torch.testing.assert_close(velocity[0], together[row], rtol=0, atol=1e-5)
    expert = adapter.expert(timesteps).requires_grad_(True)
    trained = adapter.velocity(latents, timesteps, prompts, size=size)
    assert torch.equal(trained.detach(), together)
    trained.square().sum().backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad is not None for parameter in expert.parameters()]
    expert.requires_grad_(False).zero_grad()
    assert sum(gradients) > len(gradients) / 2


def test_the_image_makes_a_difference(adapter: VideoAdapter, family: Family) -> None:
    if not family.num_images:
        return
    latents, size = adapter.initial_latents(SEEDS[:1], family.size), family.size
    prompts = [adapter.encode(["a"], images=[[picture(seed)]]) for seed in (1, 2)]
    with torch.no_grad():
        one, other = (adapter.velocity(latents, torch.tensor(500.0), prompt, size=size) for prompt in prompts)
    assert (one - other).abs().mean() > 1e-3 * one.std()


def test_a_trainer_loads_the_transformers_alone(checkpoint: Path, adapter: VideoAdapter, family: Family) -> None:
    trainer = adapter_for(checkpoint).load(checkpoint, dtype=torch.float32, components=("transformer",))
    prompts, latents = encoded(adapter, RAGGED, family.num_images), trainer.initial_latents(SEEDS, family.size)
    with torch.no_grad():
        velocities = [
            one.velocity(latents, torch.tensor(300.0), prompts, size=family.size) for one in (trainer, adapter)
        ]
    assert torch.equal(*velocities)
    with pytest.raises(ValueError, match="component text_encoder"):
        trainer.encode(["a"])


def test_wrong_sizes_are_refused(adapter: VideoAdapter) -> None:
    for size in (Size(60, 64, 9), Size(64, 8, 9)):
        with pytest.raises(ValueError, match="multiples of"):
            adapter.latent_shape(size)
    with pytest.raises(ValueError, match="1 more than a multiple of 4"):
        adapter.latent_shape(Size(64, 64, 8))


def test_check_model_passes(checkpoint: Path) -> None:
    """An exported adapter, loaded by diffusers, samples as the adapter in the trainer does; see its rules."""
    found = {result.name: (str(result.status), result.detail) for result in check_model(str(checkpoint))}
    skipped = {("skip", "no pipeline to compare with")} if "15_image" in checkpoint.name else set()
    assert set(found.values()) == {("pass", "")} | skipped


def test_media_are_encoded_as_by_the_vae(adapter: VideoAdapter, family: Family) -> None:
    frames = torch.randint(0, 256, (2, 9, 64, 64, 3), dtype=torch.uint8)
    latents = adapter.encode_media(frames, family.size)
    assert latents.shape == (2, *adapter.latent_shape(family.size))
    whole = adapter.encode_media(frames, SQUARE)
    assert torch.equal(whole[:, :, family.clean_frames :], latents)
    pixels = frames.permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    with torch.no_grad():
        modes = [adapter.vae.encode(one[None]).latent_dist.mode() for one in pixels]
        again = torch.cat([adapter.vae.decode(mode).sample.clamp(-1, 1) for mode in modes])
    expected = ((again + 1) * 127.5).round().permute(0, 2, 3, 4, 1)
    assert (adapter.decode(whole, SQUARE).float() - expected).abs().max() <= 1


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> VideoAdapter:
    """Wan2.2 TI2V: the first latent frame is the prompt's; noise, log-probs and losses are of the others."""
    path = make_tiny("wan_5b", tmp_path_factory.mktemp("models") / "wan_5b")
    adapter: Any = adapter_for(path).load(path, dtype=torch.float32)
    adapter.size_conditions(Size(64, 64, 9, 1))
    return adapter


def test_log_probs_are_means_over_free_elements(five: VideoAdapter) -> None:
    """Against the whole latents in float64, of which the clean ones are masked."""
    size = Size(64, 64, 9, 1)
    prompts, schedule = encoded(five, RAGGED, 1), five.schedule(6, size)
    latents = five.initial_latents(SEEDS, size)
    noise = five.step_noise(SEEDS, 1, latents.shape[1:])
    sigmas = schedule.sigmas[1:3]
    with torch.no_grad():
        velocity = five.velocity(latents, schedule.timesteps[1], prompts, size=size)
    step = reverse_step("sde")(latents, velocity, *sigmas, eta=0.7, sigma_max=schedule.sigma_max, noise=noise)

    def whole(part: Tensor, fill: float = 0.0) -> Tensor:
        return torch.cat([torch.full_like(part[:, :, :1], fill), part], dim=2).double()

    mask = whole(torch.ones_like(latents))
    deviation = (whole(step.prev_sample) - whole(step.mean)) * mask
    std = float(step.std[0])
    log_density = -(deviation**2) / (2 * std**2) - np.log(std) - 0.5 * np.log(2 * np.pi)
    expected = (log_density * mask).flatten(1).sum(1) / mask.flatten(1).sum(1)
    torch.testing.assert_close(step.log_prob.double(), expected, rtol=0, atol=1e-5)


def test_the_first_frame_of_the_film_is_the_image(five: VideoAdapter) -> None:
    size = Size(64, 64, 9, 1)
    prompts = five.encode(["a"], images=[[Image.linear_gradient("L").convert("RGB")]])
    films = [five.decode(five.initial_latents([seed], size), size, prompts) for seed in SEEDS]
    assert all(torch.equal(film[:, 0], films[0][:, 0]) for film in films)
    assert not torch.equal(films[0][:, -1], films[1][:, -1])


def test_what_cannot_be_is_refused(five: VideoAdapter, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"raise rollout\.num_frames"):
        five.latent_shape(Size(64, 64, 1, 1))
    bare = five.encode(["a"])
    with pytest.raises(ValueError, match="no first frame"):
        five.velocity(five.initial_latents([1], Size(64, 64, 5, 1)), torch.tensor(5.0), bare, size=Size(64, 64, 5, 1))
    path = make_tiny("wan", tmp_path / "wan")
    plain = adapter_for(path).load(path, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"remove rollout\.from_image"):
        plain.latent_shape(Size(64, 64, 9, 1))
    with pytest.raises(ValueError, match="takes no condition images"):
        plain.encode(["a"], images=[[picture(1)]])


def test_an_ode_step_keeps_the_shape(five: VideoAdapter) -> None:
    size = Size(64, 64, 5, 1)
    latents = five.initial_latents(SEEDS, size)
    assert latents.shape[2] == 1
    whole = five.initial_latents(SEEDS, size.whole)
    assert torch.equal(ode_step(latents, 0 * latents, 1.0, 0.5), whole[:, :, 1:])
    assert FIRST_FRAME in five.blank_conditions(1, size)
