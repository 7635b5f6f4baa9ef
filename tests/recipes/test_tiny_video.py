"""The tiny video checkpoint in the repository and how it is made: complete, small, flawed as described, and split from
its validation prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline

from flowfleet.models.loading import ALL_COMPONENTS, load_pipeline
from recipes.tiny_video.clips import (
    ALL_CLIPS,
    COLORS,
    DIRECTIONS,
    EDGE,
    HELD_OUT_CLIPS,
    NUM_FRAMES,
    RADII,
    SHAPES,
    TRAIN_CLIPS,
    draw_films,
    render,
)
from recipes.tiny_video.components import build_tokenizer
from recipes.tiny_video.evaluation import film, judge
from recipes.tiny_video.make_prompts import read_prompts

MODEL = Path(__file__).parents[2] / "recipes" / "tiny_video" / "model"
MAX_WEIGHTS_BYTES = 6_000_000


@pytest.fixture(scope="module")
def pipeline() -> Any:
    loaded = load_pipeline(WanPipeline, MODEL, dtype=torch.float32, device="cpu", components=ALL_COMPONENTS)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_weights_fit_in_the_repository() -> None:
    assert 0 < sum(file.stat().st_size for file in MODEL.rglob("*.safetensors")) <= MAX_WEIGHTS_BYTES


def test_every_part_is_of_the_real_class(pipeline: Any) -> None:
    assert json.loads((MODEL / "model_index.json").read_text())["_class_name"] == "WanPipeline"
    classes = {name: type(part).__name__ for name, part in pipeline.components.items() if part is not None}
    assert classes == {
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "vae": "AutoencoderKLWan",
        "text_encoder": "UMT5EncoderModel",
        "tokenizer": "T5Tokenizer",
        "transformer": "WanTransformer3DModel",
    }


def test_prompts_are_all_clips_and_split_by_what_is_held_out() -> None:
    train, validation = read_prompts("train"), read_prompts("validation")
    assert sorted(train + validation) == sorted(clip.prompt for clip in ALL_CLIPS)
    assert len({*train, *validation}) == len(COLORS) * len(SHAPES) * len(DIRECTIONS) * len(RADII)
    assert sorted(validation) == sorted(clip.prompt for clip in HELD_OUT_CLIPS)


def test_one_direction_of_every_colour_and_shape_is_held_out() -> None:
    held_out = {(clip.color, clip.shape, clip.direction) for clip in HELD_OUT_CLIPS}
    trained = {(clip.color, clip.shape, clip.direction) for clip in TRAIN_CLIPS}
    assert not held_out & trained
    assert {(color, shape) for color, shape, _ in held_out} == {(a, b) for a in COLORS for b in SHAPES}
    assert len(held_out) == len(COLORS) * len(SHAPES)
    assert {direction: sum(d == direction for *_, d in held_out) for direction in DIRECTIONS} == dict.fromkeys(
        DIRECTIONS, len(held_out) // len(DIRECTIONS)
    )


def test_every_word_of_a_prompt_is_one_token() -> None:
    tokenizer = build_tokenizer()
    for clip in ALL_CLIPS:
        assert len(tokenizer(clip.prompt).input_ids) == len(clip.prompt.split()) + 1
        assert tokenizer.unk_token_id not in tokenizer(clip.prompt).input_ids


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rendered_films_move_as_they_say(direction: str) -> None:
    clips = [clip for clip in ALL_CLIPS if clip.direction == direction]
    films = render(clips, torch.Generator().manual_seed(3)).numpy()
    assert films.shape == (len(clips), NUM_FRAMES, EDGE, EDGE, 3)
    assert judge(films, [clip.prompt for clip in clips]).motion == pytest.approx(1, abs=1e-3)
    opposite = {"left": "right", "right": "left", "up": "down", "down": "up"}[direction]
    assert judge(films, [clip.prompt.replace(direction, opposite) for clip in clips]).motion == 0


@pytest.mark.parametrize("wrong_share", [0.0, 0.3, 1.0])
def test_the_asked_share_of_captions_names_another_direction(wrong_share: float) -> None:
    films = draw_films(600, wrong_share, seed=5)
    prompts = [TRAIN_CLIPS[index].prompt for index in films.captions.tolist()]
    spread = 4 * (wrong_share * (1 - wrong_share) / 600) ** 0.5
    assert judge(films.pixels.numpy(), prompts).motion == pytest.approx(1 - wrong_share, abs=spread + 1e-3)


def test_about_half_of_the_films_move_as_asked(pipeline: Any) -> None:
    prompts = read_prompts("validation")[::4]
    found = judge(film(pipeline, prompts), prompts)
    assert 0.35 < found.motion < 0.75
    assert found.presence > 0.9
