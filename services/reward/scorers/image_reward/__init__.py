"""`image_reward`: how well people would like a picture for its prompt, by ImageReward (arXiv 2304.05977).

The score is the library's own reward: the network's output r, normalized as (r − 0.167) / 1.033. Files are read from a
folder. Nothing is downloaded, and torch reads the pickle by its restricted unpickler, which runs no code. The score of
a video is the mean over at most 8 frames.
"""

import contextlib
import importlib.util
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from PIL import Image
from pydantic import Field

from flowfleet.hardware import devices
from services.reward.networks.checkpoints import ALL, fingerprint
from services.reward.networks.libraries import library, of_samples
from services.reward.networks.torch_models import ModelScorer, batches, pick_device
from services.reward.scorer import Outcome, Sample, Score, ScorerSettings

CHECKPOINT, CONFIG, TOKENIZER = "ImageReward.pt", "med_config.json", "bert-base-uncased"
"""Contents of the folder; the last is a folder with vocab.txt."""
_FILES = (CHECKPOINT, CONFIG, f"{TOKENIZER}/vocab.txt")
MAX_TOKENS = 35
"""Prompt tokens that the model reads, [CLS] and [SEP] among them."""
_UNUSED = ("blip.vision_proj.", "blip.text_proj.", "blip.text_encoder.embeddings.position_ids")
"""Weights that do not change a score."""


class ImageRewardSettings(ScorerSettings):
    """`weights` is required."""

    weights: Path
    """Folder with ImageReward.pt, med_config.json and bert-base-uncased/vocab.txt."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """"auto": the first accelerator, else the CPU."""
    batch_size: int = Field(default=32, ge=1)
    """Pictures per forward pass."""


class ImageRewardScorer(ModelScorer[ImageRewardSettings]):
    """Component `tokens_cut`: tokens of the prompt that the model did not read."""

    name = "image_reward"
    components = ("tokens_cut",)

    def __init__(self, settings: ImageRewardSettings, num_threads: int) -> None:
        for file in _FILES:
            if not (settings.weights / file).is_file():
                raise ValueError(f"settings.weights = {str(settings.weights)!r} lacks {file}: see docs/scorers.md")
        model_code()
        self.version = f"1 (image-reward {version('image-reward')} {fingerprint(settings.weights, read=ALL)})"
        super().__init__(settings, num_threads)
        self._model: Any = None
        self._device: torch.device

    def start(self) -> None:
        super().start()
        self._device = pick_device(self._settings.device)
        folder = self._settings.weights
        try:
            with tokenizer_from(folder / TOKENIZER):
                model = model_code().ImageReward(med_config=str(folder / CONFIG), device=self._device)
            weights = torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=True)
            missing = model.load_state_dict(weights, strict=False).missing_keys
        except pickle.UnpicklingError as error:
            raise ValueError(f"{CHECKPOINT} of settings.weights holds more than tensors: fetch it again") from error
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"settings.weights = {str(folder)!r} cannot be loaded: {reason}") from error
        if lacks := [name for name in missing if not name.startswith(_UNUSED)]:
            told = f"lacks {len(lacks)} weights ({lacks[0]}, …)"
            raise ValueError(f"{CHECKPOINT} of settings.weights {told}: fetch it again")
        self._model = model.eval().requires_grad_(False).float().to(self._device)

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        pictures = [sample.pictures() for sample in samples]
        pairs = [(one, sample.prompt) for some, sample in zip(pictures, samples, strict=True) for one in some]
        found = [score for part in batches(pairs, self._settings.batch_size) for score in self._run(part)]
        return of_samples(found, [len(some) for some in pictures])

    @torch.inference_mode()
    def _run(self, pairs: Sequence[tuple[Image.Image, str]]) -> list[Outcome]:
        pictures, prompts = zip(*pairs, strict=True)
        tokenizer = self._model.blip.tokenizer
        cut = [max(0, len(ids) - MAX_TOKENS) for ids in tokenizer(list(prompts)).input_ids]
        text = tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        ).to(self._device)
        pixels = torch.stack([self._model.preprocess(picture) for picture in pictures]).to(self._device)
        with devices.bound(self._device):
            values = self._model.score_gard(text.input_ids, text.attention_mask, pixels)[:, 0].cpu().tolist()
        return [Score(value, {"tokens_cut": float(lost)}) for value, lost in zip(values, cut, strict=True)]


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> ImageRewardScorer:
    return ImageRewardScorer(ImageRewardSettings.read(settings), num_threads)


def model_code() -> Any:
    """The library's module with the model.

    Its packages are made without running their own code, which imports a trainer and a CLIP that it does not declare.
    """
    for name in ("ImageReward", "ImageReward.models"):
        if name in sys.modules:
            continue
        if not (spec := importlib.util.find_spec(name)):
            break
        sys.modules[name] = importlib.util.module_from_spec(spec)
    return library("ImageReward.ImageReward", "image_reward")


@contextlib.contextmanager
def tokenizer_from(folder: Path) -> Iterator[None]:
    """Inside, the library reads its tokenizer from `folder` instead of the Hub."""
    code = library("ImageReward.models.BLIP.blip", "image_reward")
    kind = code.BertTokenizer
    read = lambda _: kind.from_pretrained(folder, local_files_only=True)  # noqa: E731
    code.BertTokenizer = SimpleNamespace(from_pretrained=read)
    try:
        yield
    finally:
        code.BertTokenizer = kind
