"""Rewards of edits, films and sounds by models: each against what its library computes of the same eight inputs."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    ClapFeatureExtractor,
    ClapModel,
    CLIPModel,
    CLIPProcessor,
    Dinov2Config,
    Dinov2Model,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from services.reward.scorer import NO_FRAMES, Outcome, Problem, Sample, Score, Scorer
from services.reward.scorers import make
from services.reward.scorers.speech import Speech
from tests.tiny_models.clip import randomize, save_clip
from tests.tiny_models.hearing import RATE, save_clap, save_whisper
from tests.tiny_models.text_encoders import make_clip_tokenizer

SIDE, COUNT = 32, 8


def pictures(seed: int, side: int = SIDE) -> list[Image.Image]:
    noise = np.random.default_rng(seed).integers(0, 256, (COUNT, side, side, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in noise]


def sounds() -> list[np.ndarray]:
    """Tones in noise, some longer than a second, which is what the tiny models hear."""
    rng, lengths = np.random.default_rng(3), (16_000, 8_000, 24_000, 400, 15_999, 12_345, 16_001, 9_000)
    return [
        (np.sin(np.arange(length) / (number + 2)) / 2 + rng.normal(0, 0.1, length)).astype(np.float32)
        for number, length in enumerate(lengths)
    ]


def url(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def started(name: str, **settings: Any) -> Scorer[Any]:
    scorer = make(
        name, {"device": "cpu"} | {key: str(one) if isinstance(one, Path) else one for key, one in settings.items()}, 1
    )
    assert isinstance(scorer, Scorer)
    scorer.start()
    return scorer


def values(outcomes: list[Outcome]) -> list[float]:
    assert all(isinstance(one, Score) for one in outcomes), outcomes
    return [one.value for one in outcomes if isinstance(one, Score)]


def edited(before: list[Image.Image], after: list[Image.Image]) -> list[Sample]:
    return [Sample.of_picture(new, "p", {"source": url(old)}) for old, new in zip(before, after, strict=True)]


def save_dinov2(folder: Path) -> Path:
    """Writes a random tiny DINOv2 with its processor to `folder`, and returns it."""
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8)
    model = Dinov2Model(config)
    randomize(model)
    model.save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    return folder


def test_identity_is_the_cosine_of_transformers_vectors(tmp_path: Path) -> None:
    model: Any = Dinov2Model.from_pretrained(save_dinov2(tmp_path))
    processor: Any = SiglipImageProcessorPil.from_pretrained(tmp_path)
    before, after = pictures(1), pictures(2)
    with torch.no_grad():
        first, second = (
            nn.functional.normalize(model(**processor(images=row, return_tensors="pt")).pooler_output, dim=1)
            for row in (before, after)
        )
    scorer = started("identity", model=tmp_path)
    found = values(scorer.score(edited(before, after), None))
    np.testing.assert_allclose(found, (first * second).sum(1).numpy(), atol=1e-5)
    assert values(scorer.score(edited(before, before), None)) == pytest.approx([1.0] * COUNT, abs=1e-5)
    [missing] = scorer.score([Sample.of_picture(after[0], "p")], None)
    assert isinstance(missing, Problem)
    assert "needs a metadata field source" in missing.message


class Alex(nn.Module):
    """AlexNet's features and the heads under the names that the library `lpips` gives them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1))
        pooled = (False, True, True, False, False)
        self.net = nn.ModuleDict()
        self.stages: list[nn.Sequential] = []
        for number, (place, size, pools) in enumerate(zip((0, 3, 6, 8, 10), sizes, pooled, strict=True), 1):
            convolution = nn.Conv2d(size[0], size[1], size[2], size[3], size[4])
            self.net[f"slice{number}"] = nn.ModuleDict({str(place): convolution})
            self.stages.append(nn.Sequential(*([nn.MaxPool2d(3, 2)] if pools else []), convolution, nn.ReLU()))
            head = nn.Conv2d(size[1], 1, 1, bias=False)
            nn.init.uniform_(head.weight)
            self.add_module(f"lin{number - 1}", nn.ModuleDict({"model": nn.ModuleDict({"1": head})}))

    def distance(self, first: Tensor, second: Tensor) -> Tensor:
        """The paper's formula, in the weights' dtype."""
        shift = torch.tensor([-0.030, -0.088, -0.188], dtype=first.dtype).reshape(1, 3, 1, 1)
        scale = torch.tensor([0.458, 0.448, 0.450], dtype=first.dtype).reshape(1, 3, 1, 1)
        one, other = (first - shift) / scale, (second - shift) / scale
        total = torch.zeros(len(first), dtype=first.dtype)
        for layer, stage in enumerate(self.stages):
            one, other = stage(one), stage(other)
            parts = [part / (part.norm(dim=1, keepdim=True) + 1e-10) for part in (one, other)]
            weight = self.state_dict()[f"lin{layer}.model.1.weight"][0]
            total += (weight * (parts[0] - parts[1]) ** 2).sum(1).mean((1, 2))
        return total


def test_lpips_is_the_papers_distance(tmp_path: Path) -> None:
    torch.manual_seed(0)
    alex = Alex().eval()
    save_file(alex.state_dict(), tmp_path / "lpips.safetensors")
    before, after = pictures(1, 64), pictures(2, 64)
    scorer = started("lpips", model=tmp_path / "lpips.safetensors")
    found = values(scorer.score(edited(before, after), None))
    planes = [
        torch.from_numpy(np.stack([np.asarray(one) for one in row])).permute(0, 3, 1, 2) / 127.5 - 1
        for row in (before, after)
    ]
    with torch.no_grad():
        expected = -alex.double().distance(*(plane.double() for plane in planes))
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    assert values(scorer.score(edited(before, before), None)) == [0.0] * COUNT
    larger = [one.resize((128, 128), Image.Resampling.BICUBIC) for one in before]
    assert max(values(scorer.score(edited(larger, after), None))) < 0
    save_file({"net.slice1.0.weight": torch.zeros(1)}, tmp_path / "lpips.safetensors")
    with pytest.raises(ValueError, match=r"has no net\.slice1\.0\.bias: save the state_dict"):
        started("lpips", model=tmp_path / "lpips.safetensors")


def test_frame_consistency_is_vbenchs(tmp_path: Path) -> None:
    folder = save_clip(tmp_path)
    scorer = started("frame_consistency", model=folder, num_frames=4)
    films = [np.random.default_rng(seed).integers(0, 256, (4, SIDE, SIDE, 3), dtype=np.uint8) for seed in range(COUNT)]
    model: Any = CLIPModel.from_pretrained(folder)
    processor: Any = CLIPProcessor.from_pretrained(folder, backend="pil")
    expected = []
    for film in films:
        pixels = processor(images=[Image.fromarray(frame) for frame in film], return_tensors="pt").pixel_values
        with torch.no_grad():
            frames = nn.functional.normalize(model.get_image_features(pixel_values=pixels).pooler_output, dim=1)
        cosine = nn.functional.cosine_similarity
        pairs = [cosine(frames[t], frames[0], 0) + cosine(frames[t], frames[t - 1], 0) for t in range(1, 4)]
        expected.append(float(sum(pairs)) / 6)
    found = scorer.score([Sample(film, "p") for film in films], None)
    np.testing.assert_allclose(values(found), expected, atol=1e-5)
    still = Sample(np.repeat(films[0][:1], 4, axis=0), "p")
    assert values(scorer.score([still], None)) == pytest.approx([1.0], abs=1e-5)
    [single] = scorer.score([Sample(films[0][:1], "p")], None)
    assert isinstance(single, Problem)


def test_clap_is_the_models_cosine(tmp_path: Path) -> None:
    folder = save_clap(tmp_path)
    scorer, waves = started("clap", model=folder), sounds()
    assert scorer.sound_rate == RATE
    texts = [f"a sign that says {number}" for number in range(COUNT)]
    model: Any = ClapModel.from_pretrained(folder)
    tokenizer, extractor = make_clip_tokenizer(), ClapFeatureExtractor.from_pretrained(folder)
    expected = []
    for text, wave in zip(texts, waves, strict=True):
        heard = extractor(wave[:RATE], sampling_rate=RATE, return_tensors="pt")
        with torch.no_grad():
            output = model(**tokenizer([text], return_tensors="pt"), **heard)
        expected.append(float(output.logits_per_audio[0, 0] / model.logit_scale_a.exp()))
    made = [Sample(NO_FRAMES, text, sound=wave) for text, wave in zip(texts, waves, strict=True)]
    np.testing.assert_allclose(values(scorer.score(made, None)), expected, atol=1e-4)
    named = [Sample(NO_FRAMES, "p", {"sound": one.prompt}, sound=one.sound) for one in made]
    np.testing.assert_allclose(values(scorer.score(named, None)), expected, atol=1e-4)
    empty, _ = scorer.score([Sample(NO_FRAMES, "p"), made[0]], None)
    assert isinstance(empty, Problem)


def test_speech_is_the_word_error_of_whispers_greedy_transcript(tmp_path: Path) -> None:
    folder, most = save_whisper(tmp_path), 12
    scorer, waves = started("speech", model=folder, max_tokens=most), sounds()
    assert isinstance(scorer, Speech)
    model: Any = WhisperForConditionalGeneration.from_pretrained(folder)
    tokenizer: Any = WhisperTokenizer.from_pretrained(folder)
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    texts = []
    for wave in waves:
        features, tokens = extractor(wave, sampling_rate=RATE, return_tensors="pt").input_features, [257]
        while len(tokens) <= most and tokens[-1] != 256:
            with torch.no_grad():
                logits = model(input_features=features, decoder_input_ids=torch.tensor([tokens])).logits
            tokens.append(int(logits[0, -1].argmax()))
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
    assert scorer.transcripts([Sample(NO_FRAMES, "", sound=wave) for wave in waves]) == texts
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    ("said", "errors"), [("a red sign", 0), ("A red, sign!", 0), ("a sign", 1), ("one blue sign here", 3), ("", 3)]
)
def test_words_that_are_not_said_cost(said: str, errors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = started("speech", model=save_whisper(tmp_path))
    monkeypatch.setattr(scorer, "transcripts", lambda samples: [said] * len(samples))
    wanted = [{"speech": "A red sign."}, {}]
    made = [Sample(NO_FRAMES, 'he says "A red sign"', metadata, sound=sounds()[0]) for metadata in wanted]
    for outcome in scorer.score(made, None):
        assert isinstance(outcome, Score)
        assert outcome.components == {"word_errors": errors, "words": 3}
        assert outcome.value == pytest.approx(max(0, 1 - errors / 3))
    [unknown] = scorer.score([Sample(NO_FRAMES, "he says nothing", sound=sounds()[0])], None)
    assert isinstance(unknown, Problem)
    assert "give metadata speech" in unknown.message
