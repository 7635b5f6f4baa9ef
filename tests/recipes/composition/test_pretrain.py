"""The base model of composition: its parts, its pieces against the libraries' own, and a miniature pre-training."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flowfleet.models.families.qwen_image_attention import use_joint_attention
from recipes.composition import atlas, captions, pretrain
from recipes.composition.base import flow
from recipes.composition.base.autoencoder import (
    encode_modes,
    encode_pixels,
    fidelity,
    single_frames,
    train_autoencoder,
)
from recipes.composition.base.components import (
    FULL,
    SMALL,
    ModelSize,
    build_pipeline,
    build_tokenizer,
    build_transformer,
    num_parameters,
)
from recipes.composition.base.flow import (
    NEGATIVE_PROMPT,
    FlowRecipe,
    encode_captions,
    pictures_of,
    train_transformer,
    velocity,
)
from recipes.composition.base.training import Recipe, train
from recipes.composition.pretrain import (
    Plan,
    load,
    make,
    parse_options,
    rendered,
    save,
    weights_hash,
    worlds_of,
)
from recipes.composition.world import SMALL_NOUNS, World
from recipes.tiny.components import LATENT_CHANNELS
from tests.recipes.composition.shapes import shapes

TINY = ModelSize(num_blocks=2, num_heads=2, rope_axes=(8, 12, 12), text_width=64, vae_width=8)
WORDS = ["a", "red", "blue", "disc", "box", "left", "of", "Q", '"']
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pipeline() -> Any:
    torch.manual_seed(0)
    return build_pipeline(TINY, WORDS)


def test_a_word_is_a_token_wherever_it_stands(pipeline: Any) -> None:
    assert all(len(pipeline.tokenizer(text).input_ids) == 1 for word in WORDS for text in (word, f" {word}"))
    assert pipeline.tokenizer.tokenize('red box "QQ"') == ["red", "Ġbox", 'Ġ"', "Q", "Q", '"']


def test_all_that_captions_are_made_of_is_a_token(world: World) -> None:
    words = captions.words(world)
    tokenizer = build_tokenizer(words)
    assert all(len(tokenizer(text).input_ids) == 1 for word in words for text in (word, f" {word}"))


def test_the_template_takes_as_many_tokens_as_the_pipeline_drops(pipeline: Any) -> None:
    prefix, _ = pipeline.prompt_template_encode.split("{}")
    assert len(pipeline.tokenizer(prefix).input_ids) == pipeline.prompt_template_encode_start_idx


def test_tokenizers_made_twice_are_equal() -> None:
    assert build_tokenizer(WORDS).get_vocab() == build_tokenizer(WORDS).get_vocab()


def test_captions_are_encoded_as_the_pipeline_does(pipeline: Any) -> None:
    texts = ["a red disc left of a blue box", 'a "QQQ"', NEGATIVE_PROMPT]
    embeddings, mask = encode_captions(pipeline, texts, torch.float32)
    expected, expected_mask = pipeline.encode_prompt(texts)
    length = expected.shape[1]
    assert embeddings.shape[1] % 16 == 0
    torch.testing.assert_close(embeddings[:, :length], expected, atol=1e-5, rtol=0)
    assert torch.equal(mask[:, :length], expected_mask.bool())
    assert not embeddings[:, length:].any()
    assert not mask[:, length:].any()


def test_velocity_is_the_transformers_forward(pipeline: Any) -> None:
    transformer = _shaken(pipeline.transformer)
    embeddings, mask = encode_captions(pipeline, ["a red disc", "a blue box left of a disc"], torch.float32)
    latents, levels = torch.randn(2, 16, 4 * LATENT_CHANNELS), torch.tensor([0.13, 0.87])
    expected = transformer(
        hidden_states=latents,
        timestep=levels,
        encoder_hidden_states=embeddings,
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, 4, 4)]] * 2,
        return_dict=False,
    )[0]
    frequencies = transformer.pos_embed([[(1, 4, 4)]], max_txt_seq_len=mask.shape[1], device=CPU)
    use_joint_attention(transformer)
    torch.testing.assert_close(velocity(transformer, latents, levels, embeddings, mask, frequencies), expected)


def test_an_untrained_transformer_gives_zeros_and_learns_from_its_ends(pipeline: Any) -> None:
    embeddings, mask = encode_captions(pipeline, ["a red disc"], torch.float32)
    frequencies = pipeline.transformer.pos_embed([[(1, 4, 4)]], max_txt_seq_len=mask.shape[1], device=CPU)
    latents = torch.randn(1, 16, 4 * LATENT_CHANNELS)
    transformer = copy.deepcopy(pipeline.transformer)
    output = velocity(transformer, latents, torch.ones(1), embeddings, mask, frequencies)
    assert not output.any()
    (output - latents).square().mean().backward()  # type: ignore[no-untyped-call]
    assert transformer.proj_out.bias.grad.any()


def test_single_frames_are_encoded_as_the_autoencoder_does(pipeline: Any) -> None:
    images = torch.rand(2, 3, 1, 32, 32) * 2 - 1
    expected = pipeline.vae.encode(images).latent_dist.mode()
    decoded = pipeline.vae.decode(expected).sample
    with single_frames(pipeline.vae):
        modes = encode_modes(pipeline.vae, images)
        painted = pipeline.vae.decoder(pipeline.vae.post_quant_conv(modes)).clamp(-1, 1)
    torch.testing.assert_close(modes, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(painted, decoded, atol=1e-5, rtol=1e-4)


def test_rates_rise_stay_and_fall() -> None:
    rates = Recipe(100, rate=2.0, num_warmup=10, cooldown=0.5).rates()
    assert rates[0] == pytest.approx(0.2)
    assert torch.equal(rates[9:51], torch.full((42,), 2.0))
    assert rates[75] == pytest.approx(1.0, rel=1e-6)  # halfway down a cosine
    assert rates[99] == pytest.approx(1 - math.cos(math.pi / 50), rel=1e-5)


def test_training_is_adamw_with_clipped_gradients() -> None:
    target = torch.tensor([3.0, -1.0, 0.5])
    recipe = Recipe(7, rate=0.1, num_warmup=3, weight_decay=0.1, max_norm=0.5)
    ours, theirs = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, dtype=torch.float64))
    reports = train("test", [ours], lambda: (ours - target).square().sum(), recipe)
    optimizer = torch.optim.AdamW([theirs], betas=recipe.betas, weight_decay=recipe.weight_decay, foreach=False)
    for rate, seen in zip(recipe.rates().tolist(), reports, strict=True):
        loss = (theirs - target).square().sum()
        assert seen.loss == pytest.approx(loss.item(), rel=1e-5)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_([theirs], recipe.max_norm)
        optimizer.step()
    torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


def test_the_average_follows_and_the_same_seed_gives_the_same_bits(pipeline: Any) -> None:
    first, second = (_few_steps(pipeline, seed=3) for _ in range(2))
    other = _few_steps(pipeline, seed=4)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert all(torch.equal(weight, weight.half().float()) for weight in first.values())


def _few_steps(pipeline: Any, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    own = copy.copy(pipeline)
    own.transformer = copy.deepcopy(pipeline.transformer)
    latents = torch.randn(8, 16, 4 * LATENT_CHANNELS, generator=torch.Generator().manual_seed(0))
    pictures = pictures_of(own, latents, ["a red disc", "a box"] * 4, torch.float32)
    assert pictures.caption.tolist() == [0, 1] * 4
    assert len(pictures.embeddings) == 3
    train_transformer(own, pictures, (4, 4), FlowRecipe(3, rate=1e-3, num_warmup=1, batch_size=4))
    weights: dict[str, Tensor] = own.transformer.state_dict()
    return weights


def test_a_step_learns_of_as_many_tokens_in_larger_pictures(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = copy.copy(pipeline)
    own.transformer, seen = copy.deepcopy(pipeline.transformer), list[tuple[int, ...]]()

    monkeypatch.setattr(flow, "velocity", partial(_noted, flow.velocity, seen))
    both = [
        pictures_of(own, torch.randn(8, tokens, 4 * LATENT_CHANNELS), ["a red disc", "a box"] * 4, torch.float32)
        for tokens in (16, 64)
    ]
    recipe = FlowRecipe(2, rate=1e-3, num_warmup=1, batch_size=8)
    train_transformer(own, both[0], (4, 4), recipe, larger=(both[1], (8, 8)))
    assert seen == [(8, 16), (2, 64)] * 2


def _noted(inner: Any, seen: list[tuple[int, ...]], transformer: Any, latents: Tensor, *rest: Any) -> Any:
    seen.append(tuple(latents.shape[:2]))
    return inner(transformer, latents, *rest)


@pytest.mark.long
@torch.no_grad()
def test_the_autoencoder_learns_of_both_sizes(pipeline: Any) -> None:
    """White pictures alone do not teach it to paint black ones, which only the larger set has."""
    white, black = (torch.full((2, 3, edge, edge), value, dtype=torch.uint8) for edge, value in ((16, 255), (32, 0)))
    errors = []
    for larger in (None, black):
        torch.manual_seed(0)
        vae = copy.deepcopy(pipeline.vae)
        with torch.enable_grad():
            train_autoencoder(vae, white, Recipe(40, rate=2e-3, num_warmup=4), 4, larger)
        errors.append(fidelity(vae, black))
    assert errors[1] > errors[0] + 3


def test_what_is_saved_loads_as_a_job_loads_it(pipeline: Any, tmp_path: Path) -> None:
    own = copy.copy(pipeline)
    own.vae, own.transformer = copy.deepcopy(pipeline.vae), _shaken(pipeline.transformer)
    pixels = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    train_autoencoder(own.vae, pixels, Recipe(2, rate=1e-3), batch_size=2)
    latents = encode_pixels(own.vae, pixels)
    assert latents.shape == (4, 4, 4 * LATENT_CHANNELS)
    assert latents.mean().abs() < 1e-3
    assert latents.std() == pytest.approx(1, abs=0.05)
    digest = save(own, tmp_path)
    files = [next((tmp_path / part).glob("*.safetensors")) for part in ("text_encoder", "transformer", "vae")]
    assert digest == weights_hash(tmp_path) == hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()
    loaded = load(tmp_path, CPU)
    weights = load_file(files[1])
    assert all(torch.equal(weight.half(), weights[name]) for name, weight in loaded.transformer.state_dict().items())
    image = loaded("a red disc", height=32, width=32, num_inference_steps=2, true_cfg_scale=1.0).images[0]
    assert image.size == (32, 32)


@pytest.mark.parametrize(("size", "least", "most"), [(SMALL, 3e6, 5e6), (FULL, 30e6, 50e6)])
def test_sizes_of_the_transformers(size: ModelSize, least: float, most: float) -> None:
    with torch.device("meta"):
        assert least < num_parameters(build_transformer(size)) < most


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ("", [64]),
        ("--larger 128", [64, 128]),
        ("--size 128 --larger 256", [128, 256]),
    ],
)
def test_a_world_may_be_drawn_in_other_sizes(options: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atlas, "load", shapes)
    world, larger = worlds_of(parse_options(["--world", "small", "--output", "base", *options.split()]))
    assert [one.size for one in (world, larger) if one] == sizes
    assert {one.nouns for one in (world, larger) if one} == {SMALL_NOUNS}


@pytest.mark.parametrize(("size", "batches"), [(64, [8, 2]), (128, [8, 2]), (256, [2] * 5)])
def test_large_pictures_come_in_smaller_batches(size: int, batches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the batches of 128 pixels and less, for bases have been made of them."""
    monkeypatch.setattr(pretrain, "RENDER_BATCH", 8)
    found = list(rendered(World.of(size, SMALL_NOUNS[:3], shapes()), 10, 0.0, 1, CPU))
    assert [len(pixels) for pixels, _ in found] == batches == [len(texts) for _, texts in found]


@pytest.mark.long
def test_a_miniature_pretraining_learns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught, measured = list[Tensor](), list[Tensor]()

    def teach(vae: Any, pixels: Tensor, recipe: Recipe, batch_size: int, larger: Tensor | None) -> None:
        taught.append(pixels)
        train_autoencoder(vae, pixels, recipe, batch_size, larger)

    def measure(vae: Any, pixels: Tensor) -> float:
        measured.append(pixels)
        return fidelity(vae, pixels)

    monkeypatch.setattr(pretrain, "train_autoencoder", teach)
    monkeypatch.setattr(pretrain, "fidelity", measure)
    world = World.of(32, SMALL_NOUNS[:3], shapes())
    steps = Recipe(60, rate=2e-3, num_warmup=10)
    flow = FlowRecipe(200, rate=2e-3, num_warmup=10, batch_size=32)
    with caplog.at_level(logging.INFO):
        pipeline = make(world, Plan(TINY, steps, 16, 128, flow, 512, 0.3), 1, CPU, compiled=False)
    said = [message.split(" step ") for message in caplog.messages if ": loss " in message]
    losses = {
        name: [float(rest.split("loss ")[1].split(",")[0]) for who, rest in said if who == name]
        for name in ("autoencoder", "transformer")
    }
    assert not (measured[0].flatten(1)[:, None] == taught[0].flatten(1)).all(2).any()  # on scenes that it never saw
    assert losses["autoencoder"][-1] < 0.8 * losses["autoencoder"][0]
    assert losses["transformer"][0] < 2.1  # before the first step it is the variance of noise and latents: 2
    assert losses["transformer"][-1] < 0.6  # each element guessed by itself, of Gaussian latents, gives at least 1
    save(pipeline, tmp_path)
    assert load(tmp_path, CPU)("a star", height=32, width=32, num_inference_steps=2).images[0].size == (32, 32)


def _shaken(transformer: Any) -> Any:
    """A copy whose weights are random throughout: a fresh one changes nothing."""
    shaken = copy.deepcopy(transformer)
    for parameter in shaken.parameters():
        nn.init.normal_(parameter, std=0.05)
    return shaken


def test_training_ends_where_the_loss_is_no_number() -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="the loss is nan after 1 steps: lower the learning rate"):
        train("test", [weight], lambda: (weight * torch.nan).sum(), Recipe(5, rate=1e-3))
