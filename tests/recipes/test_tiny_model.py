"""The tiny checkpoint in the repository: complete, small, flawed as described, and split from its validation words."""

import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline

from flowfleet.models.loading import ALL_COMPONENTS, load_pipeline
from recipes.tiny.evaluation import Judge
from recipes.tiny.make_prompts import NUM_TRAIN, NUM_VALIDATION, read_prompts
from recipes.tiny.painting import paint
from recipes.tiny.signs import ALPHABET, BOARD_COLORS, WORD_LENGTHS, Sign, prompt_for, word_in

MODEL = Path(__file__).parents[2] / "recipes" / "tiny" / "model"
MAX_WEIGHTS_BYTES = 16_000_000


@pytest.fixture(scope="module")
def pipeline() -> Any:
    loaded = load_pipeline(QwenImagePipeline, MODEL, dtype=torch.float32, device="cpu", components=ALL_COMPONENTS)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_weights_fit_in_the_repository() -> None:
    assert sum(file.stat().st_size for file in MODEL.rglob("*.safetensors")) <= MAX_WEIGHTS_BYTES


def test_every_part_is_of_the_real_class(pipeline: Any) -> None:
    assert json.loads((MODEL / "model_index.json").read_text())["_class_name"] == "QwenImagePipeline"
    classes = {name: type(part).__name__ for name, part in pipeline.components.items()}
    assert classes == {
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "vae": "AutoencoderKLQwenImage",
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        "tokenizer": "Qwen2Tokenizer",
        "transformer": "QwenImageTransformer2DModel",
    }


def test_scheduler_has_the_numbers_of_the_real_model(pipeline: Any) -> None:
    expected = {
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "max_image_seq_len": 8192,
        "max_shift": 0.9,
        "num_train_timesteps": 1000,
        "shift": 1.0,
        "shift_terminal": 0.02,
        "time_shift_type": "exponential",
        "use_dynamic_shifting": True,
    }
    assert {key: pipeline.scheduler.config[key] for key in expected} == expected


def test_the_template_takes_as_many_tokens_as_the_pipeline_drops(pipeline: Any) -> None:
    prefix, suffix = pipeline.prompt_template_encode.split("{}")
    assert len(pipeline.tokenizer(prefix).input_ids) == pipeline.prompt_template_encode_start_idx == 34
    assert pipeline.tokenizer.convert_ids_to_tokens(pipeline.tokenizer(suffix).input_ids) == [
        "<|im_end|>",
        "Ċ",
        "<|im_start|>",
        "assistant",
        "Ċ",
    ]


@pytest.mark.parametrize("color", BOARD_COLORS)
def test_a_character_of_a_word_is_a_token(pipeline: Any, color: str) -> None:
    empty = len(pipeline.tokenizer(prompt_for(Sign("A", color))).input_ids) - 1
    for character in string.ascii_uppercase + string.digits:
        assert len(pipeline.tokenizer(prompt_for(Sign(f"A{character}7", color))).input_ids) == empty + 3


def test_no_training_prompt_has_a_validation_word() -> None:
    train, validation = read_prompts("train"), read_prompts("validation")
    words, held_out = {*map(word_in, train)}, {*map(word_in, validation)}
    assert (len(train), len(words)) == (NUM_TRAIN, NUM_TRAIN)
    assert (len(validation), len(held_out)) == (NUM_VALIDATION, NUM_VALIDATION)
    assert not words & held_out
    assert all(len(word) in WORD_LENGTHS and set(word) <= set(ALPHABET) for word in words | held_out)


def test_half_of_the_signs_are_illegible(pipeline: Any) -> None:
    prompts = read_prompts("validation")[::8]
    assert 0.35 < Judge(num_threads=1).judge(paint(pipeline, prompts), prompts).ocr < 0.75
