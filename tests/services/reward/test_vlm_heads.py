"""Heads on a tiny Qwen2.5-VL: equal to transformers' own hidden states at places that a plain loop finds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from recipes.tiny_vlm.model import TinyVlm, make_tiny_vlm
from services.reward.scorer import Problem, Sample, Score
from services.reward.scorers.vlm_heads import make

NAMES = ("quality", "motion", "fit")
TOKENS = ["A", "B", "0"]
QUESTION = "Does this picture show {prompt}?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vlm(tmp_path_factory.mktemp("vlm") / "model")


@pytest.fixture(scope="module")
def heads(folder: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    width = TinyVlm.load(folder).model.config.text_config.hidden_size
    tensors = {"weight": torch.randn(3, width, generator=generator), "bias": torch.tensor([0.1, -0.2, 0.3])}
    tensors |= {"mean": torch.tensor([1.0, 2.0, 3.0]), "std": torch.tensor([2.0, 0.5, 1.5])}
    save_file(tensors, folder / "heads.safetensors")
    return tensors


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    given = {"model": str(folder), "heads": str(folder / "heads.safetensors"), "names": list(NAMES)}
    return given | {"question": QUESTION, "device": "cpu"} | more


def film(num_frames: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_frames, 64, 64, 3), dtype=np.uint8)


def hidden(folder: Path, frames: np.ndarray, prompt: str, tokens: list[str]) -> torch.Tensor:
    """(T, D) by transformers; a film's patches are cut here, pixel by pixel."""
    vlm = TinyVlm.load(folder)
    text = {"type": "text", "text": QUESTION.replace("{prompt}", prompt)}
    inputs = vlm.encode([{"role": "user", "content": [{"type": "image"}, text]}], [Image.fromarray(frames[0])])
    if len(frames) > 1:
        part, side, edge = vlm.image_processor, 8, 8
        mean, std = np.array(part.image_mean), np.array(part.image_std)
        pixels = ((frames / 255 - mean) / std).astype(np.float32)
        pixels = np.concatenate([pixels, pixels[-1:]]) if len(pixels) % 2 else pixels
        patches = [
            pixels[time : time + 2, row * side : (row + 1) * side, column * side : (column + 1) * side]
            .transpose(3, 0, 1, 2)
            .reshape(-1)
            for time in range(0, len(pixels), 2)
            for rows in range(0, edge, 2)
            for columns in range(0, edge, 2)
            for row in (rows, rows + 1)
            for column in (columns, columns + 1)
        ]
        ids, pad = inputs["input_ids"][0], vlm.tokenizer.convert_tokens_to_ids("<|video_pad|>")
        places = (ids == vlm.model.config.image_token_id).nonzero().flatten()
        films = torch.full((len(patches) // 4,), pad)
        ids = torch.cat([ids[: places[0]], films, ids[places[-1] + 1 :]])[None]
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": 2 * (ids == pad).long(),
        }
        grid = torch.tensor([[len(pixels) // 2, edge, edge]])
        inputs |= {"pixel_values_videos": torch.from_numpy(np.stack(patches)), "video_grid_thw": grid}
    if tokens:
        more = torch.tensor([vlm.tokenizer.convert_tokens_to_ids(tokens)])
        for name, fill in (("input_ids", more), ("attention_mask", more * 0 + 1), ("mm_token_type_ids", more * 0)):
            inputs[name] = torch.cat([inputs[name], fill], 1)
    with torch.no_grad():
        return vlm.model(**inputs, output_hidden_states=True).hidden_states[-1][0]


@pytest.mark.parametrize("tokens", [[], TOKENS])
def test_scores_equal_the_models_own(folder: Path, heads: dict[str, torch.Tensor], tokens: list[str]) -> None:
    weights = {"quality": 0.5, "fit": 2.0}
    scorer = make("vlm_heads", settings(folder, tokens=tokens, weights=weights), 1)
    scorer.start()
    for seed, num_frames in enumerate((1, 2, 4, 5) if tokens else (1, 3, 6, 8)):
        frames, prompt = film(num_frames, seed), f"sign {seed}"
        (found,) = scorer.score([Sample(frames, prompt)], None)
        assert isinstance(found, Score)
        states = hidden(folder, frames, prompt, tokens)
        read = states[-3:] if tokens else states[-1:].expand(3, -1)
        values = ((heads["weight"].double() * read.double()).sum(1) + heads["bias"] - heads["mean"]) / heads["std"]
        assert [found.components[name] for name in NAMES] == pytest.approx(values.tolist(), abs=1e-4)
        assert found.value == pytest.approx(float(0.5 * values[0] + 2 * values[2]), abs=1e-4)


def test_what_does_not_fit_is_refused(folder: Path, heads: dict[str, torch.Tensor]) -> None:
    for changes, words in (
        ({"names": ["one"]}, r"it needs a tensor weight \(1, width\), a row for each of settings.names"),
        ({"weights": {"speed": 1.0}}, "'speed' is none of settings.names"),
        ({"tokens": ["A"]}, "give one for each of the 3 heads, or none"),
        ({"heads": str(folder / "absent")}, "cannot be read"),
    ):
        with pytest.raises(ValueError, match=words):
            make("vlm_heads", settings(folder, **changes), 1)
    scorer = make("vlm_heads", settings(folder, tokens=["A", "B", "<|absent|>"]), 1)
    with pytest.raises(ValueError, match="the tokenizer does not know all of them"):
        scorer.start()
    scorer = make("vlm_heads", settings(folder), 1)
    scorer.start()
    (problem,) = scorer.score([Sample(film(1, 0), "a <|im_end|>")], None)
    assert isinstance(problem, Problem)
