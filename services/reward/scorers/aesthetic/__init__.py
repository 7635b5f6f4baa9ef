"""`aesthetic`: how beautiful a picture is, by a linear head over a picture embedding. The prompt does not matter.

    score = W_n (… W_2 (W_1 e + b_1) + b_2 …) + b_n        e: the embedding, divided by its length

Two predictors are this, about 1 … 10 each: LAION's improved-aesthetic-predictor (Schuhmann; e of CLIP ViT-L/14; 768 →
1024 → 128 → 64 → 16 → 1; the one of DDPO and flow_grpo, which divide it by 10 or not), and Aesthetic Predictor V2.5
(discus0434; e the pooled output of SigLIP so400m/14 at 384). Neither has an activation between its layers, and dropout
does nothing here, so the layers are folded into one vector and one number, in float64.

The head is a safetensors file with the keys of the published one: `layers.0.weight`, `layers.0.bias`, … or
`scoring_head.0.weight`, …; layers are taken in the order of their numbers. Of a video, the score is the mean over at
most 8 evenly spaced frames.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import SiglipVisionModel

from flowfleet.rewards.gradients import PixelInput
from services.reward.networks.checkpoints import check_checkpoint, check_processor
from services.reward.networks.encoders import ClipEncoder, PictureEncoder
from services.reward.networks.pixels import gradients_of, leaves_of
from services.reward.networks.torch_models import ModelScorer, ModelSettings, batches
from services.reward.scorer import GradientOutcome, Outcome, PlainScorer, Sample, Score, ScoreGradient, mean_score

Head = tuple[NDArray[np.float64], float]
"""(D,) and a number: the score is their product and sum with the unit vector of a picture."""

_KEY = re.compile(r"(?:.*\.)?(\d+)\.(weight|bias)")


class AestheticSettings(ModelSettings):
    """`model` is the CLIP or SigLIP whose pictures' embeddings the head was trained on."""

    head: Path
    """Safetensors file of the head."""


class AestheticScorer(ModelScorer[AestheticSettings]):
    """No components."""

    name = "aesthetic"
    gives_gradient = True

    def __init__(self, settings: AestheticSettings, num_threads: int) -> None:
        config = check_checkpoint(settings.model, "model", ("clip", "siglip", "siglip_vision_model"))
        self._is_clip = config["model_type"] == "clip"
        check_processor(settings.processor_folder, settings.processor_setting, tokenizer=self._is_clip)
        self._head = read_head(settings.head)
        self.version, self.pinned = settings.version(1), settings.pinned
        super().__init__(settings, num_threads)
        self._encoder: PictureEncoder

    def start(self) -> None:
        super().start()
        settings, model = self._settings, self._settings.model
        self._encoder = (
            ClipEncoder(settings, model, "model", self._num_threads)
            if self._is_clip
            else PictureEncoder(SiglipVisionModel, settings, model, "model", self._num_threads)
        )
        if (width := self._encoder.width) != len(self._head[0]):
            raise ValueError(
                f"settings.head takes embeddings of {len(self._head[0])} numbers, settings.model makes {width}: "
                "name the head of that model"
            )

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        weights, bias = self._head
        pictures = [sample.pictures() for sample in samples]
        vectors = self._encoder.pictures([picture for part in pictures for picture in part]).numpy().astype(np.float64)
        scores = iter((vectors @ weights + bias).tolist())
        return [mean_score([Score(next(scores)) for _ in part]) for part in pictures]

    def score_with_gradient(self, samples: Sequence[PixelInput], params: None) -> list[GradientOutcome]:
        weights, bias = self._head
        outcomes: list[GradientOutcome] = []
        for part in batches(samples, self._settings.batch_size):
            leaves = leaves_of(part, self._encoder.device)
            scores = self._encoder.embed(leaves).cpu().double() @ torch.from_numpy(weights) + bias
            gradients = gradients_of(scores, leaves)
            outcomes += [ScoreGradient(*pair) for pair in zip(scores.tolist(), gradients, strict=True)]
        return outcomes


def read_head(path: Path) -> Head:
    """The layers of a head, folded into one. ValueError where the file holds no such layers."""
    if path.suffix != ".safetensors" or not path.is_file():
        raise ValueError(
            f"settings.head = {str(path)!r}: name a safetensors file that is here. The published heads are pickles: "
            "docs/scorers.md tells how to convert one"
        )
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"settings.head = {str(path)!r} is no safetensors file: {error}") from None
    layers: dict[int, dict[str, NDArray[np.float64]]] = {}
    for key, tensor in tensors.items():
        if match := _KEY.fullmatch(key):
            layers.setdefault(int(match[1]), {})[match[2]] = tensor.double().numpy()
    try:
        return _folded([layers[number] for number in sorted(layers)])
    except (KeyError, ValueError, IndexError):
        raise ValueError(
            f"settings.head = {str(path)!r} has {', '.join(sorted(tensors)) or 'nothing'}: it takes linear layers that "
            "fit each other, layers.0.weight (1024, 768) and layers.0.bias (1024) and so on, the last of one number"
        ) from None


def _folded(layers: Sequence[Mapping[str, NDArray[np.float64]]]) -> Head:
    weights, biases = layers[0]["weight"], layers[0]["bias"]
    for layer in layers[1:]:
        weights, biases = layer["weight"] @ weights, layer["weight"] @ biases + layer["bias"]
    (row,), (bias,) = weights, biases  # ValueError unless there is one of each
    return row, float(bias)


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> PlainScorer:
    return AestheticScorer(AestheticSettings.read(settings), num_threads)
