"""`clip`, `pickscore` and `hps` against transformers' own forward in float64, and what they refuse."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPModel, CLIPProcessor

from services.reward.networks.encoders import MAX_PROMPTS
from services.reward.scorer import Outcome, Sample, Score, Scorer
from services.reward.scorers import make
from services.reward.scorers.clip import letterboxed
from tests.tiny_models.clip import save_clip

NAMES = ("clip", "pickscore", "hps")
PROMPTS = ("a red sign", "seven green bottles", "a red sign", "日本語 ✓", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


def scorer(name: str, folder: Path, **settings: Any) -> Scorer[None]:
    made = make(name, {"model": str(folder), "device": "cpu", **settings}, 1)
    assert isinstance(made, Scorer)
    made.start()
    return made


def pictures(number: int, width: int = 48, height: int = 48) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (number, 4, 4, 3), dtype=np.uint8)
    return [Image.fromarray(pixels).resize((width, height)) for pixels in small]


def samples(images: list[Image.Image]) -> list[Sample]:
    return [Sample.of_picture(image, prompt) for image, prompt in zip(images, PROMPTS, strict=False)]


def values(outcomes: list[Outcome]) -> list[float]:
    assert all(isinstance(outcome, Score) for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes if isinstance(outcome, Score)]


def oracle(folder: Path, images: list[Image.Image]) -> tuple[list[float], float]:
    """Cosines and exp(logit_scale) by CLIPModel.forward in float64."""
    model = CLIPModel.from_pretrained(folder, dtype=torch.float64)
    inputs = CLIPProcessor.from_pretrained(folder)(
        text=list(PROMPTS[: len(images)]), images=images, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        logits = model(**{**inputs, "pixel_values": inputs.pixel_values.double()}).logits_per_image.diagonal()
    scale = model.logit_scale.exp().item()
    return [logit / scale for logit in logits.tolist()], scale


def test_the_formulas_over_transformers_own_cosine(folder: Path) -> None:
    images = pictures(5)
    cosines, factor = oracle(folder, images)
    assert np.ptp(cosines) > 0.05  # the model tells them apart
    for name, settings, multiple in (
        ("clip", {}, 1.0),
        ("clip", {"scale": 2.5}, 2.5),
        ("pickscore", {}, factor / 26),
        ("pickscore", {"divide_by": 1.0}, factor),
        ("hps", {}, 1.0),
    ):
        made = scorer(name, folder, **settings)
        found = values(made.score(samples(images), None))
        assert found == pytest.approx([multiple * cosine for cosine in cosines], abs=1e-5 * multiple), name
        assert made.score_range == pytest.approx((-multiple, multiple))
        first = made.score(samples(images), None)[0]
        assert isinstance(first, Score)
        assert set(first.components) == set(made.components)


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_batches_order_and_neighbors_do_not_matter(folder: Path, batch_size: int) -> None:
    made, whole = scorer("clip", folder, batch_size=batch_size), samples(pictures(5))
    together = values(made.score(whole, None))
    backwards = values(made.score(whole[::-1], None))
    assert together == pytest.approx(backwards[::-1], abs=1e-6)
    assert together == pytest.approx([values(made.score([sample], None))[0] for sample in whole], abs=1e-6)
    assert values(made.score(whole, None)) == together  # the same batch, with texts from the cache: the same bits


def test_of_a_video_the_mean(folder: Path) -> None:
    made = scorer("clip", folder)
    images = pictures(3)
    video = Sample(np.stack([np.asarray(image) for image in images]), PROMPTS[0])
    each = values(made.score([Sample.of_picture(image, PROMPTS[0]) for image in images], None))
    assert values(made.score([video, *samples(images)], None))[0] == pytest.approx(math.fsum(each) / 3, abs=1e-6)


def test_a_long_prompt_is_cut_and_counted(folder: Path) -> None:
    """77 tokens with start and end: 75 letters are read, each of which is a token here."""
    made, image = scorer("clip", folder), pictures(1)[0]
    long, read = "x " * 100, "x " * 75
    outcomes = made.score([Sample.of_picture(image, long), Sample.of_picture(image, read)], None)
    assert [outcome.components["tokens_cut"] for outcome in outcomes if isinstance(outcome, Score)] == [25.0, 0.0]
    assert values(outcomes)[0] == pytest.approx(values(outcomes)[1], abs=1e-6)


def test_texts_are_embedded_once_and_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.reward.networks.encoders.MAX_PROMPTS", 2)
    encoder: Any = getattr(scorer("clip", folder), "_encoder")  # noqa: B009 - mypy
    asked: list[str] = []
    embed = encoder._embed_texts

    def noting(texts: Any) -> Any:
        asked.extend(texts)
        return embed(texts)

    monkeypatch.setattr(encoder, "_embed_texts", noting)
    encoder.texts(["a", "b", "a"])
    encoder.texts(["a"])
    assert asked == ["a", "b"]
    vectors, _ = encoder.texts(["c", "a", "d"])
    assert asked == ["a", "b", "c", "d"]
    assert len(vectors) == 3
    encoder.texts(["b"])
    assert asked[-1] == "b"
    assert MAX_PROMPTS > 2


def test_hps_sees_the_whole_of_a_wide_picture(folder: Path) -> None:
    """What lies outside of the middle square changes the score, unless it is cropped."""
    wide = pictures(1, 96, 48)[0]
    other = wide.copy()
    other.paste((255, 0, 0), (0, 0, 20, 48))
    pair = [Sample.of_picture(image, PROMPTS[0]) for image in (wide, other)]
    padded, cropped = (values(scorer("hps", folder, fit=fit).score(pair, None)) for fit in ("pad", "crop"))
    assert abs(padded[0] - padded[1]) > 1e-4
    assert cropped[0] == cropped[1]
    boxed = np.asarray(letterboxed(wide))
    assert boxed.shape == (96, 96, 3)
    assert not boxed[:24].any()
    assert not boxed[72:].any()
    assert np.array_equal(boxed[24:72], np.asarray(wide))


def test_half_precision_is_close(folder: Path) -> None:
    images = pictures(5)
    exact = values(scorer("clip", folder).score(samples(images), None))
    half = values(scorer("clip", folder, dtype="bfloat16").score(samples(images), None))
    assert half == pytest.approx(exact, abs=0.03)
    assert half != exact


def test_the_version_knows_weights_and_settings(folder: Path, tmp_path: Path) -> None:
    again, other = save_clip(tmp_path / folder.name), save_clip(tmp_path / "other" / folder.name, seed=1)
    versions = {
        "first": make("clip", {"model": str(folder)}, 1).version,
        "weights": make("clip", {"model": str(other)}, 1).version,
        "scale": make("clip", {"model": str(folder), "scale": 2.5}, 1).version,
        "dtype": make("clip", {"model": str(folder), "dtype": "bfloat16"}, 1).version,
    }
    assert len(set(versions.values())) == len(versions)
    assert versions["first"] == make("clip", {"model": str(again), "batch_size": 2, "device": "cpu"}, 4).version
    assert folder.name in versions["first"]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_lacks_something(name: str, folder: Path, tmp_path: Path) -> None:
    def refused(pattern: str, **settings: Any) -> None:
        with pytest.raises(ValueError, match=pattern):
            make(name, {"model": str(tmp_path / "model"), **settings}, 1)

    model = tmp_path / "model"
    refused(r"settings\.model = .*no such folder")
    model.mkdir()
    refused(r"settings\.model = .* has no config\.json")
    (model / "config.json").write_text('{"model_type": "bert"}')
    refused(r"model_type = 'bert'.*clip")
    (model / "config.json").write_bytes((folder / "config.json").read_bytes())
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    refused(r"no \*\.safetensors.*save_pretrained")
    (model / "model.safetensors").write_bytes(b"\xff" * 20)
    refused("no image processor.*settings.processor")
    refused("is not a whole file of safetensors", processor=str(folder))
    refused(r"settings\.procesor: unknown setting; did you mean processor", procesor=str(folder))
    refused(r"settings\.batch_size", batch_size=0)


def test_weights_that_are_missing_are_not_made_up(folder: Path, tmp_path: Path) -> None:
    save_clip(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"settings\.model.*lacks 1 weights of CLIPModel \(visual_projection.weight"):
        make("clip", {"model": str(tmp_path)}, 1).start()


def test_a_device_that_is_not_here(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"settings\.device = 'npu'"):
        make("clip", {"model": str(folder), "device": "npu"}, 1).start()
