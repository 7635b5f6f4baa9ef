"""`clip`, `pickscore`, `hps`: how well a picture fits its prompt, by a CLIP model (transformers' CLIPModel).

With c = cos(image embedding, text embedding), both projected:

- `clip`: settings.scale × c, the CLIP score. flow_grpo: exp(logit_scale) / 30 × c, for OpenAI's models scale 3.333.
  Hessel et al. (arXiv 2104.08718) say 2.5 × max(c, 0): scale 2.5, and `clip = [0.0, 2.5]` in the job.
- `pickscore`: exp(logit_scale) × c / settings.divide_by. Kirstain et al., "Pick-a-Pic" (arXiv 2305.01569), for the
  checkpoint PickScore_v1, a CLIP-H. Theirs is divide_by 1, about 17 … 24; flow_grpo divides by 26, the default here.
- `hps`: c. Wu et al., "Human Preference Score v2" (arXiv 2306.09341), code of HPSv2 and of flow_grpo: for HPS_v2 and
  HPS_v2.1, a CLIP-H. Its pictures are letterboxed: the longer side is scaled to the model's size and black is added,
  where CLIP crops. With settings.fit = "crop" it crops.

A prompt of more tokens than the model reads (77 as a rule) is cut; `tokens_cut` counts how many are gone. Of a video,
score and components are the means over at most 8 evenly spaced frames.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from pydantic import Field

from flowfleet.rewards.gradients import PixelInput
from services.reward.networks.checkpoints import check_checkpoint, check_processor, read_scalar
from services.reward.networks.encoders import ClipEncoder
from services.reward.networks.pixels import gradients_of, leaves_of
from services.reward.networks.torch_models import ModelScorer, ModelSettings, batches
from services.reward.scorer import GradientOutcome, Outcome, PlainScorer, Sample, Score, ScoreGradient, mean_score

Settings = TypeVar("Settings", bound=ModelSettings)


class _ClipScorer(ModelScorer[Settings]):
    """Components: `tokens_cut`, of the prompt, and those of the subclass."""

    gives_gradient = True
    number: ClassVar[int] = 1
    """Version of this code: raised when it gives the same picture another score."""

    def __init__(self, settings: Settings, num_threads: int) -> None:
        check_checkpoint(settings.model, "model", ("clip",))
        check_processor(settings.processor_folder, settings.processor_setting, tokenizer=True)
        self.version, self.pinned = settings.version(self.number), settings.pinned
        super().__init__(settings, num_threads)
        self._encoder: ClipEncoder

    def start(self) -> None:
        super().start()
        self._encoder = ClipEncoder(self._settings, self._settings.model, "model", self._num_threads)

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        texts, cuts = self._encoder.texts([sample.prompt for sample in samples])
        pictures = [sample.pictures() for sample in samples]
        images = self._encoder.pictures([self._fitted(picture) for part in pictures for picture in part])
        of_samples = torch.split(images, [len(part) for part in pictures])
        outcomes: list[Outcome] = []
        for text, cut, part in zip(texts, cuts, of_samples, strict=True):
            cosines = [_within_one(cosine) for cosine in (part @ text).tolist()]
            outcomes.append(mean_score([self._judge(cosine, cut) for cosine in cosines]))
        return outcomes

    def score_with_gradient(self, samples: Sequence[PixelInput], params: None) -> list[GradientOutcome]:
        outcomes: list[GradientOutcome] = []
        for part in batches(samples, self._settings.batch_size):
            texts, cuts = self._encoder.texts([sample.prompt for sample in part])
            leaves = leaves_of(part, self._encoder.device)
            images = self._encoder.embed([self._fitted_pixels(leaf) for leaf in leaves])
            cosines = (images * texts.clone().to(images)).sum(dim=1)
            gradients = gradients_of(cosines, leaves)
            slope = self._judge(1.0, 0).value  # scores are proportional to cosines
            for cosine, cut, gradient in zip(cosines.tolist(), cuts, gradients, strict=True):
                score = self._judge(_within_one(cosine), cut)
                outcomes.append(ScoreGradient(score.value, np.float32(slope) * gradient, score.components))
        return outcomes

    @abstractmethod
    def _judge(self, cosine: float, tokens_cut: int) -> Score:
        """The score of a picture, proportional to the cosine."""

    def _fitted(self, picture: Image.Image) -> Image.Image:
        """Returns the picture for the image processor, which crops the middle square."""
        return picture

    def _fitted_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        """The same of pixels (3, H, W)."""
        return pixels


def _within_one(cosine: float) -> float:
    """Clips to ± 1: products of float32 unit vectors may exceed it slightly. NaN stays NaN."""
    return cosine if math.isnan(cosine) else min(max(cosine, -1.0), 1.0)


class _CosineScorer(_ClipScorer[Settings]):
    """The cosine times a factor. Components: `cosine`, `tokens_cut`."""

    components = ("cosine", "tokens_cut")

    def _scale(self, factor: float) -> None:
        self._factor, self.score_range = factor, (-factor, factor)

    def _judge(self, cosine: float, tokens_cut: int) -> Score:
        return Score(self._factor * cosine, {"cosine": cosine, "tokens_cut": float(tokens_cut)})


class ClipSettings(ModelSettings):
    """Settings of `clip`."""

    scale: float = Field(default=1.0, gt=0.0)
    """Factor of the cosine."""


class ClipScore(_CosineScorer[ClipSettings]):
    """See `_CosineScorer`."""

    name = "clip"

    def __init__(self, settings: ClipSettings, num_threads: int) -> None:
        super().__init__(settings, num_threads)
        self._scale(settings.scale)


class PickScoreSettings(ModelSettings):
    """Settings of `pickscore`."""

    divide_by: float = Field(default=26.0, gt=0.0)
    """Divisor: 26 as in flow_grpo (scores about 0.65 … 0.95), 1 as its authors."""


class PickScore(_CosineScorer[PickScoreSettings]):
    """See `_CosineScorer`."""

    name = "pickscore"

    def __init__(self, settings: PickScoreSettings, num_threads: int) -> None:
        super().__init__(settings, num_threads)
        self._scale(math.exp(read_scalar(settings.model, "model", "logit_scale")) / settings.divide_by)


class HpsSettings(ModelSettings):
    """Settings of `hps`."""

    fit: Literal["pad", "crop"] = "pad"
    """Fits a picture that is not square. "pad": black sides, as HPSv2. "crop": the middle, as CLIP."""


class HumanPreferenceScore(_ClipScorer[HpsSettings]):
    """Component: `tokens_cut`."""

    name = "hps"
    components = ("tokens_cut",)
    score_range = (-1.0, 1.0)

    def _judge(self, cosine: float, tokens_cut: int) -> Score:
        return Score(cosine, {"tokens_cut": float(tokens_cut)})

    def _fitted(self, picture: Image.Image) -> Image.Image:
        return letterboxed(picture) if self._settings.fit == "pad" else picture

    def _fitted_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        if self._settings.fit != "pad":
            return pixels
        height, width = pixels.shape[1:]
        above, left = (max(0, width - height), max(0, height - width))
        sides = (left // 2, left - left // 2, above // 2, above - above // 2)
        return torch.nn.functional.pad(pixels, sides)


def letterboxed(picture: Image.Image) -> Image.Image:
    """The picture in the middle of a black square of its longer side."""
    side = max(picture.size)
    if picture.width == picture.height:
        return picture
    square = Image.new("RGB", (side, side))
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> PlainScorer:
    if name == "clip":
        return ClipScore(ClipSettings.read(settings), num_threads)
    if name == "pickscore":
        return PickScore(PickScoreSettings.read(settings), num_threads)
    return HumanPreferenceScore(HpsSettings.read(settings), num_threads)
