"""Scores with gradients: those of whole pictures are Score's, the gradient is that of a difference, and what a service
does with calls that it cannot answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from flowfleet.proto.reward_pb2 import DescribeRequest, PixelSample, ScoreWithGradientRequest
from flowfleet.proto.reward_pb2_grpc import RewardServiceStub
from flowfleet.rewards.gradients import PixelInput, cut, read_gradient, read_tensor, write_tensor
from recipes.tiny_vlm.model import TinyVlm, make_tiny_vlm
from recipes.tiny_vlm.teach import RUBRIC, conversation
from services.reward.judge.rubrics import load_rubric
from services.reward.scorer import Sample, Score, ScoreGradient, Scorer
from services.reward.scorers import make
from services.reward.scorers.image_quality import quality
from services.reward.scorers.image_quality.gradient import soft_entropy, soft_quality
from tests.services.reward.conftest import ServiceProcess
from tests.tiny_models.clip import save_clip

Make = Callable[[Path], tuple[str, dict[str, Any]]]


def _clip(folder: Path) -> tuple[str, dict[str, Any]]:
    return "clip", {"model": str(save_clip(folder / "clip")), "scale": 2.5}


def _pickscore(folder: Path) -> tuple[str, dict[str, Any]]:
    return "pickscore", {"model": str(save_clip(folder / "clip"))}


def _aesthetic(folder: Path) -> tuple[str, dict[str, Any]]:
    layer = {"layers.0.weight": np.linspace(-1, 2, 16, dtype=np.float32)[None], "layers.0.bias": np.ones(1, np.float32)}
    save_file(layer, folder / "head.safetensors")
    return "aesthetic", {"model": str(save_clip(folder / "clip")), "head": str(folder / "head.safetensors")}


def _local_vlm(folder: Path) -> tuple[str, dict[str, Any]]:
    return "local_vlm", {"model": str(make_tiny_vlm(folder / "vlm")), "rubric": str(RUBRIC)}


MAKERS: dict[str, Make] = {
    "clip": _clip,
    "pickscore": _pickscore,
    "aesthetic": _aesthetic,
    "local_vlm": _local_vlm,
    "image_quality": lambda folder: ("image_quality", {}),
}
MODELS = [name for name in MAKERS if name != "image_quality"]


def scorer(name: str, folder: Path) -> Scorer[Any]:
    kind, settings = MAKERS[name](folder)
    made = make(kind, settings | ({"device": "cpu"} if settings else {}), 1)
    assert isinstance(made, Scorer)
    made.start()
    return made


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    """(H, W, 3) uint8, smooth with some noise, away from black and white."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(60, 200, (4, 4, 3), dtype=np.uint8)).resize((width, height))
    return np.clip(np.asarray(coarse) + random.integers(-5, 6, (height, width, 3)), 0, 255).astype(np.uint8)


def pixels_of(frame: np.ndarray) -> np.ndarray:
    return (frame.transpose(2, 0, 1) / 255).astype(np.float32)


def scored(made: Scorer[Any], pixels: np.ndarray, prompt: str = "a red sign") -> ScoreGradient:
    (found,) = made.score_with_gradient([PixelInput(pixels, prompt)], made.parse({}))
    assert isinstance(found, ScoreGradient), found
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_score_is_that_of_score_but_for_rounding_when_resized(name: str, tmp_path: Path) -> None:
    made = scorer(name, tmp_path)
    side = 64 if name == "local_vlm" else 32  # what the tiny checkpoints see
    for frame, tolerance in ((picture(side, side), 1e-5), (picture(150, 180), 0.03)):
        (plain,) = made.score([Sample(frame[None], "a red sign")], made.parse({}))
        assert isinstance(plain, Score)
        assert scored(made, pixels_of(frame)).value == pytest.approx(
            plain.value, abs=tolerance * max(1, abs(plain.value))
        )


@pytest.mark.parametrize("name", MAKERS)
def test_the_score_rises_as_its_gradient_says(name: str, tmp_path: Path) -> None:
    """Along the gradient, and along a part of it; the conformance suite asks services the same."""
    made = scorer(name, tmp_path)
    pixels = pixels_of(picture(80, 72, seed=3))
    found = scored(made, pixels)
    assert found.gradient.shape == pixels.shape
    assert np.abs(found.gradient).max() > 0
    for part in (found.gradient, np.where(np.arange(80) < 40, found.gradient, 0).astype(np.float32)):
        direction = part / np.abs(part).max()
        expected = float((found.gradient.astype(np.float64) * direction).sum())
        step = np.float32(0.004)
        up, down = (scored(made, pixels + sign * step * direction).value for sign in (1, -1))
        assert (up - down) / (2 * step) == pytest.approx(expected, rel=0.05), name


def test_a_local_judge_says_what_the_checkpoint_gives_its_answers(tmp_path: Path) -> None:
    """The probabilities of "Yes" and "No" in all their spellings, of the checkpoint as the recipe itself loads it."""
    made = scorer("local_vlm", tmp_path)
    frame = picture(64, 64)
    vlm = TinyVlm.load(tmp_path / "vlm")
    inputs = vlm.encode(conversation(load_rubric(str(RUBRIC))), [Image.fromarray(frame)])
    with torch.no_grad():
        shares = torch.softmax(vlm.model(**inputs, logits_to_keep=1).logits[0, -1].double(), 0)
    spoken = {token: vlm.tokenizer.decode([token]).strip().lower() for token in range(len(vlm.tokenizer))}
    yes, no = (sum(float(shares[token]) for token, text in spoken.items() if text == word) for word in ("yes", "no"))
    found = scored(made, pixels_of(frame))
    assert found.value == pytest.approx(yes / (yes + no), rel=1e-4)
    assert found.components["mass"] == pytest.approx(yes + no, rel=1e-4)


def test_softened_quality_is_near_the_plain_one_and_counts_colors_alike() -> None:
    frame = picture(96, 96, seed=5)
    soft, plain = float(soft_quality(torch.from_numpy(pixels_of(frame)))), quality(frame).value
    assert soft == pytest.approx(plain, abs=0.15)
    middles = torch.tensor([0.5, 2.5, 4.5, 6.5]) / 8
    flat = middles.repeat_interleave(16).reshape(1, 8, 8).expand(3, 8, 8)
    assert float(soft_entropy(flat)) == pytest.approx(2.0)  # four colors, each in the middle of its level


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"nothing", "pixels is not valid safetensors"),
        (write_tensor(np.zeros((3, 2, 2), np.float32), "other"), "the tensors are other; send one named pixels"),
        (write_tensor(np.zeros((1, 2, 2), np.float32), "pixels"), r"shape \(1, 2, 2\); send \(3, height, width\)"),
        (write_tensor(np.full((3, 2, 2), 1.5, np.float32), "pixels"), "pixels lie outside 0 to 1"),
        (write_tensor(np.full((3, 2, 2), np.nan, np.float32), "pixels"), "pixels lie outside 0 to 1"),
        (write_tensor(np.zeros((3, 1, 20_000), np.float32), "pixels"), "16384 a side are read"),
    ],
    ids=["no safetensors", "other name", "one channel", "too bright", "not a number", "too wide"],
)
def test_what_is_no_picture_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PixelInput.of(PixelSample(sample_id="1", pixels=data))


def test_gradients_that_do_not_fit_are_refused() -> None:
    data = write_tensor(np.full((3, 2, 2), np.inf, np.float32), "gradient")
    with pytest.raises(ValueError, match=r"shape \(3, 2, 2\), its pixels have \(3, 4, 4\)"):
        read_gradient(data, (3, 4, 4))
    with pytest.raises(ValueError, match="NaN or infinite"):
        read_gradient(data, (3, 2, 2))
    assert read_tensor(data, "gradient").shape == (3, 2, 2)


def test_calls_are_cut_by_samples_and_by_bytes() -> None:
    samples = [PixelInput(np.zeros((3, 8, side), np.float32), "") for side in (8, 8, 8, 64, 8)]
    sizes = [[one.pixels.shape[2] for one in call] for call in cut(samples, 2, 3 * 8 * 20 * 4)]
    assert sizes == [[8, 8], [8], [64], [8]]


def test_a_scorer_without_gradients_says_so(ocr_process: ServiceProcess) -> None:
    with grpc.insecure_channel(ocr_process.address) as channel:
        stub: Any = RewardServiceStub(channel)
        described = stub.Describe(DescribeRequest(), timeout=30)
        assert (described.gives_gradient, described.contract) == (False, 1)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ScoreWithGradient(ScoreWithGradientRequest(), timeout=30)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "gives no gradient" in error.details()
