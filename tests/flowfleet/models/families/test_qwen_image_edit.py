"""The Qwen-Image-Edit adapter against diffusers' own `QwenImageEditPlusPipeline` on tiny random checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as diffusers_edit
from PIL import Image
from torch import Tensor
from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor

from flowfleet.conformance.models import RAGGED, SEEDS, generators, sample_ode
from flowfleet.models.embeds import PromptEmbeds, concat_embeds
from flowfleet.models.families.qwen_image_edit import QwenImageEditAdapter
from flowfleet.models.picture_prompts import PictureProcessor
from flowfleet.models.registry import family_of
from flowfleet.models.settings import NO_GUIDANCE, Guidance, Size
from tests.flowfleet.models import parity
from tests.tiny_models import make_tiny

SQUARE = Size(64, 64)
VAE_AREA, SEEN_AREA = 80 * 80, 84 * 84


def noise_image(width: int, height: int, seed: int) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


WIDE_AND_TALL = [[noise_image(96, 48, seed), noise_image(50, 90, seed + 10)] for seed in range(3)]
"""Two for each of the prompts; (rows, columns) of tokens are (4, 8) and (6, 4)."""


@pytest.fixture(autouse=True)
def _small_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers_edit, "VAE_IMAGE_SIZE", VAE_AREA)
    monkeypatch.setattr(diffusers_edit, "CONDITION_IMAGE_SIZE", SEEN_AREA)


@pytest.fixture(scope="module", params=["qwen_image_edit", "qwen_image_edit_2511"])
def any_checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def any_adapter(any_checkpoint: Path) -> QwenImageEditAdapter:
    adapter = QwenImageEditAdapter.load(any_checkpoint, dtype=torch.float32)
    assert adapter.transformer.config.zero_cond_t == ("2511" in any_checkpoint.name)
    return adapter


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen_image_edit", tmp_path_factory.mktemp("models") / "edit")


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> QwenImageEditAdapter:
    return QwenImageEditAdapter.load(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> Any:
    return load_pipeline(checkpoint)


def load_pipeline(checkpoint: Path) -> Any:
    pipeline = QwenImageEditPlusPipeline.from_pretrained(str(checkpoint), processor=None)
    pipeline.processor = transformers_processor(checkpoint, pipeline.tokenizer)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def transformers_processor(checkpoint: Path, tokenizer: Any) -> Any:
    """`Qwen2VLProcessor` without its constructor, which wants a processor of videos, which wants torchvision."""
    processor: Any = Qwen2VLProcessor.__new__(Qwen2VLProcessor)
    processor.image_processor = Qwen2VLImageProcessorPil.from_pretrained(str(checkpoint), subfolder="processor")
    processor.tokenizer, processor.chat_template = tokenizer, None
    for kind in "image", "video":
        setattr(processor, f"{kind}_token", f"<|{kind}_pad|>")
        setattr(processor, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>"))
    return processor


@pytest.fixture(scope="module")
def told_pipeline(any_checkpoint: Path) -> Any:
    """A pipeline that passes on the token types that its processor makes, as it did before transformers 5."""
    pipeline = load_pipeline(any_checkpoint)
    processor, made = pipeline.processor, {}

    def remember(**arguments: Any) -> Any:
        made.update(processor(**arguments))
        return processor(**arguments)

    def pass_on(_: Any, positional: Any, named: dict[str, Any]) -> Any:
        return positional, named | {"mm_token_type_ids": made["mm_token_type_ids"]}

    pipeline.processor = remember
    pipeline.text_encoder.register_forward_pre_hook(pass_on, with_kwargs=True)
    return pipeline


def encode(adapter: QwenImageEditAdapter, prompts: list[str] | None = None) -> PromptEmbeds:
    return adapter.encode(RAGGED if prompts is None else prompts, images=WIDE_AND_TALL)


def velocity(adapter: QwenImageEditAdapter, prompts: PromptEmbeds, timestep: Tensor | float = 500.0) -> Tensor:
    latents = adapter.initial_latents(SEEDS[: len(prompts)], SQUARE)
    with torch.no_grad():
        return adapter.velocity(latents, torch.as_tensor(timestep), prompts, size=SQUARE)


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("size", [SQUARE, Size(32, 96)])
def test_sampling_equals_the_pipeline(
    any_adapter: QwenImageEditAdapter, told_pipeline: Any, size: Size, scale: float
) -> None:
    adapter = any_adapter
    arguments: dict[str, Any] = {"height": size.height, "width": size.width, "num_inference_steps": 3}
    arguments |= {"true_cfg_scale": scale, "negative_prompt": "blur" if scale > 1 else None}
    negative = encode(adapter, ["blur"] * 3)
    latents = sample_ode(adapter, encode(adapter), size, 3, Guidance(scale), negative)
    pictures = adapter.decode(latents, size)
    for row, prompt in enumerate(RAGGED):  # The pipeline takes one prompt at a time.
        expected = [
            told_pipeline(
                list(WIDE_AND_TALL[row]), prompt, generator=generators()[row], output_type=output_type, **arguments
            ).images
            for output_type in ("latent", "np")
        ]
        torch.testing.assert_close(latents[row : row + 1], expected[0], rtol=0, atol=1e-5)
        parity.assert_same_pictures(pictures[row : row + 1], expected[1])


def test_the_encoder_is_told_which_tokens_are_pictures(
    checkpoint: Path, adapter: QwenImageEditAdapter, pipeline: Any
) -> None:
    """diffusers' pipeline alone does not; transformers' own processor says which they are."""
    pictures = [pipeline.image_processor.resize(image, 64, 128) for image in WIDE_AND_TALL[0]]
    with torch.no_grad():
        untold, _ = pipeline.encode_prompt(["a sign"], image=pictures)
        ours, _ = adapter.pipeline.encode_prompt(["a sign"], image=pictures)
    tokens = "".join(f"Picture {i}: <|vision_start|><|image_pad|><|vision_end|>" for i in (1, 2))
    text = pipeline.prompt_template_encode.format(tokens + "a sign")
    inputs = pipeline.processor(text=[text], images=pictures, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = pipeline.text_encoder(**inputs, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(ours, states[:, 64:])
    assert (ours - untold).abs().max() > 1e-2


def test_the_processor_is_transformers(checkpoint: Path, adapter: QwenImageEditAdapter) -> None:
    tokenizer = adapter.pipeline.tokenizer
    texts = ["<|vision_start|><|image_pad|><|vision_end|> one", "two <|image_pad|> and <|image_pad|>", "none"]
    pictures = [noise_image(40, 80, 1), noise_image(61, 93, 2), noise_image(300, 90, 3)]
    arguments: dict[str, Any] = {"text": texts, "images": pictures, "padding": True, "return_tensors": "pt"}
    ours = PictureProcessor.load(checkpoint, tokenizer)(**arguments)
    expected = transformers_processor(checkpoint, tokenizer)(**arguments)
    assert set(ours) == set(expected) - {"mm_token_type_ids"}
    for name, value in ours.items():
        assert torch.equal(value, expected[name])


def test_published_configurations_of_the_processor_load(checkpoint: Path, tmp_path: Path) -> None:
    """They are of the processor on torchvision and have its settings."""
    copied = shutil.copytree(checkpoint / "processor", tmp_path / "processor")
    config = copied / "preprocessor_config.json"
    config.write_text(
        json.dumps(
            json.loads(config.read_text())
            | {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen2_5_VLProcessor"}
            | {"min_pixels": 3136, "max_pixels": 12845056, "device": None, "disable_grouping": None, "crop_size": None}
        )
    )
    processor = PictureProcessor.load(tmp_path, tokenizer=None).image_processor
    assert processor(images=[noise_image(20, 20, 0)], return_tensors="pt")["image_grid_thw"].tolist() == [[1, 4, 4]]
    shutil.rmtree(copied)
    with pytest.raises(ValueError, match="no configuration of its processor"):
        PictureProcessor.load(tmp_path, tokenizer=None)


def test_encoding_keeps_what_follows_the_templates_head(adapter: QwenImageEditAdapter) -> None:
    encoded, tokenizer = encode(adapter), adapter.pipeline.tokenizer
    head, tail = adapter.pipeline.prompt_template_encode.split("{}")
    assert len(tokenizer(head).input_ids) == adapter.pipeline.prompt_template_encode_start_idx
    seen = [(64, 128), (128, 64)]  # pixels: 84² at an aspect ratio of 2 and 5 / 9, in multiples of 32; then of 28
    pictures = "".join(
        f"Picture {i}: <|vision_start|>{'<|image_pad|>' * (round(h / 28) * round(w / 28))}<|vision_end|>"
        for i, (h, w) in enumerate(seen, start=1)
    )
    lengths = [len(tokenizer(pictures + prompt + tail).input_ids) for prompt in RAGGED]
    assert encoded.mask.sum(1).tolist() == lengths
    assert encoded.extras["image_1"].shape == (3, 4, 8, 64)
    assert encoded.extras["image_2"].shape == (3, 6, 4, 64)
    parity.assert_extras_survive(encoded, "image_1")
    parity.assert_extras_survive(encoded, "image_2")


@pytest.mark.parametrize(("size", "steps"), [(SQUARE, 6), (Size(32, 256), 28)])
def test_schedule_and_start_are_the_pipelines(
    adapter: QwenImageEditAdapter, pipeline: Any, size: Size, steps: int
) -> None:
    """The condition's tokens count for neither."""
    forward = pipeline.transformer.forward
    pipeline.transformer.forward = lambda hidden_states, **_: (0 * hidden_states,)
    started = pipeline(
        WIDE_AND_TALL[0],
        "a",
        height=size.height,
        width=size.width,
        num_inference_steps=steps,
        generator=generators()[0],
        output_type="latent",
    ).images
    pipeline.transformer.forward = forward
    schedule = adapter.schedule(steps, size)
    assert torch.equal(schedule.sigmas, pipeline.scheduler.sigmas)
    assert torch.equal(schedule.timesteps, pipeline.scheduler.timesteps)
    assert torch.equal(adapter.initial_latents(SEEDS, size)[:1], started)


def test_condition_pixels_scale_both_views(adapter: QwenImageEditAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = adapter.encode(["a"], images=WIDE_AND_TALL[:1])
    monkeypatch.setattr(adapter, "condition_pixels", VAE_AREA)
    same = adapter.encode(["a"], images=WIDE_AND_TALL[:1])
    monkeypatch.setattr(adapter, "condition_pixels", 4 * VAE_AREA)
    larger = adapter.encode(["a"], images=WIDE_AND_TALL[:1])
    monkeypatch.setattr(adapter, "condition_pixels", None)
    monkeypatch.setattr(diffusers_edit, "VAE_IMAGE_SIZE", 4 * VAE_AREA)
    monkeypatch.setattr(diffusers_edit, "CONDITION_IMAGE_SIZE", 4 * SEEN_AREA)
    expected = adapter.encode(["a"], images=WIDE_AND_TALL[:1])
    for ours, theirs in (same, usual), (larger, expected):
        assert torch.equal(ours.embeds, theirs.embeds)
        assert all(torch.equal(ours.extras[name], theirs.extras[name]) for name in theirs.extras)
    assert larger.extras["image_1"].shape == (1, 8, 14, 64)  # 160² at an aspect ratio of 2: 113 x 226 pixels
    assert larger.embeds.shape[1] > usual.embeds.shape[1]
    monkeypatch.setattr(adapter, "condition_pixels", 32 * 32)
    least = adapter.encode(["a"], images=WIDE_AND_TALL[:1])
    assert least.extras["image_1"].shape == least.extras["image_2"].shape == (1, 2, 2, 64)


def test_every_image_and_their_order_matter(adapter: QwenImageEditAdapter) -> None:
    squares = [noise_image(40, 40, seed) for seed in range(3)]

    def answer(seen: list[Image.Image], latent: list[Image.Image]) -> Tensor:
        embeds, latents = (adapter.encode(["a"], images=[images]) for images in (seen, latent))
        return velocity(adapter, PromptEmbeds(embeds.embeds, embeds.mask, latents.extras))

    usual = answer(squares[:2], squares[:2])
    floor = 1e-3 * usual.std()  # some 50 times the tolerance of the comparison with the pipeline
    for changed in squares[1::-1], squares[:3:2], squares[2:0:-1]:
        assert (answer(changed, squares[:2]) - usual).abs().mean() > floor
        assert (answer(squares[:2], changed) - usual).abs().mean() > floor
    assert torch.equal(answer(squares[:2], squares[:2]), usual)


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "CMYK"])
def test_images_of_every_mode_are_taken_as_rgb(adapter: QwenImageEditAdapter, mode: str) -> None:
    image = noise_image(40, 40, 0).convert(mode)
    ours, expected = (adapter.encode(["a"], images=[[one]]) for one in (image, image.convert("RGB")))
    assert torch.equal(ours.embeds, expected.embeds)
    assert torch.equal(ours.extras["image_1"], expected.extras["image_1"])


def test_rows_do_not_depend_on_their_batch(adapter: QwenImageEditAdapter) -> None:
    timesteps = torch.tensor([900.0, 20.0, 500.0])
    together = velocity(adapter, encode(adapter), timesteps)
    for row in range(3):
        latents = adapter.initial_latents(SEEDS[row : row + 1], SQUARE)
        prompts = adapter.encode(RAGGED[row : row + 1], images=WIDE_AND_TALL[row : row + 1])
        with torch.no_grad():
            alone = adapter.velocity(latents, timesteps[row], prompts, size=SQUARE)
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-6)


@pytest.mark.parametrize("guidance", [NO_GUIDANCE, Guidance(4.0)])
def test_gradients_flow(any_adapter: QwenImageEditAdapter, guidance: Guidance) -> None:
    adapter, latents = any_adapter, any_adapter.initial_latents(SEEDS, SQUARE)
    prompts, negative = encode(adapter), encode(adapter, [" "] * 3)

    def answer() -> Tensor:
        return adapter.velocity(
            latents, torch.tensor(700.0), prompts, size=SQUARE, guidance=guidance, negative=negative
        )

    with torch.no_grad():
        frozen = answer()
    adapter.transformer.requires_grad_(True)
    trained = answer()
    assert torch.equal(trained.detach(), frozen)
    trained.square().sum().backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in adapter.transformer.parameters()]
    adapter.transformer.requires_grad_(False).zero_grad()
    assert sum(gradient is not None and bool(gradient.abs().max() > 0) for gradient in gradients) > len(gradients) / 2


def test_media_are_encoded_as_by_the_vae(adapter: QwenImageEditAdapter, pipeline: Any) -> None:
    frames, size = torch.randint(0, 256, (2, 1, 32, 64, 3), dtype=torch.uint8), Size(32, 64)
    with torch.no_grad():
        mode = pipeline.vae.encode(frames.permute(0, 4, 1, 2, 3).float() / 255 * 2 - 1).latent_dist.mode()
        again = pipeline.vae.decode(mode).sample[:, :, 0]
    parity.assert_same_pictures(
        adapter.decode(adapter.encode_media(frames, size), size),
        (again / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy(),
    )


def test_a_trainer_loads_the_transformer_alone(checkpoint: Path, adapter: QwenImageEditAdapter) -> None:
    family = family_of(checkpoint)
    assert family.takes_images
    trainer = family.load().load(checkpoint, dtype=torch.float32, components=("transformer",))
    assert isinstance(trainer, QwenImageEditAdapter)
    assert trainer.pipeline.processor is None
    assert trainer.latent_shape(SQUARE) == adapter.latent_shape(SQUARE) == (16, 64)
    assert torch.equal(trainer.schedule(6, SQUARE).sigmas, adapter.schedule(6, SQUARE).sigmas)
    prompts = encode(adapter)
    assert torch.equal(velocity(trainer, prompts), velocity(adapter, prompts))
    with pytest.raises(ValueError, match="component text_encoder"):
        encode(trainer)
    parity.assert_lora_fits(trainer)


def test_computes_in_bfloat16(checkpoint: Path) -> None:
    adapter = QwenImageEditAdapter.load(checkpoint, dtype=torch.bfloat16)
    prompts = encode(adapter)
    assert prompts.embeds.dtype == torch.bfloat16
    latents = sample_ode(adapter, prompts, SQUARE, 2)
    assert latents.dtype == torch.float32
    assert latents.isfinite().all()
    assert adapter.decode(latents, SQUARE).shape == (3, 1, 64, 64, 3)


def test_loading_writes_nothing_to_the_terminal(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    QwenImageEditAdapter.load(checkpoint, dtype=torch.float32)
    assert capfd.readouterr() == ("", "")


def test_wrong_images_are_refused(checkpoint: Path, adapter: QwenImageEditAdapter) -> None:
    square, wide, tall = noise_image(40, 40, 0), noise_image(80, 40, 0), noise_image(40, 80, 0)
    with pytest.raises(ValueError, match="but got none"):
        adapter.encode(["a", "b"])
    with pytest.raises(ValueError, match="2 prompts need as many sequences of condition images, but got 1"):
        adapter.encode(["a", "b"], images=[[square]])
    for images in [], [square] * 4:
        with pytest.raises(ValueError, match=f"takes 1 to 3 condition images a prompt, but one has {len(images)}"):
            adapter.encode(["a"], images=[images])
    with pytest.raises(ValueError, match=r"image of 900 x 30 is too narrow .* raise condition_pixels"):
        adapter.encode(["a"], images=[[noise_image(900, 30, 0)]])
    with pytest.raises(ValueError, match=r"image_1 .* one shape, .*\(4, 8, 64\), \(8, 4, 64\)"):
        adapter.encode(["a", "b"], images=[[wide], [tall]])  # as many tokens, but another grid
    with pytest.raises(ValueError, match="condition images of one number"):
        concat_embeds([adapter.encode(["a"], images=[images]) for images in ([square], [square, square])])
    with pytest.raises(ValueError, match=r"must not contain <\|image_pad\|>"):
        adapter.encode(["a <|image_pad|>"], images=[[square]])
    without = QwenImageEditAdapter.load(checkpoint, dtype=torch.float32, components=("text_encoder",))
    with pytest.raises(ValueError, match="component vae"):
        without.encode(["a"], images=[[square]])
    encoded = adapter.encode(["a"], images=[[square]])
    with pytest.raises(ValueError, match="have no condition images"):
        velocity(adapter, PromptEmbeds(encoded.embeds, encoded.mask))


def test_wrong_sizes_are_refused(adapter: QwenImageEditAdapter) -> None:
    parity.assert_wrong_sizes_are_refused(adapter)
