"""Vision models as encoders: pictures to vectors, with gradient where it is asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import CLIPModel

from flowfleet.hardware import devices
from flowfleet.lru import LruCache
from services.reward.networks.torch_models import (
    ModelSettings,
    PictureReader,
    batches,
    in_batches,
    load_model,
    load_tokenizer,
    pick_device,
)

MAX_PROMPTS = 4096
"""Prompts whose embeddings are kept: 16 MiB for a CLIP-H. The samples of a group, and of the next epoch, share one."""


class PictureEncoder:
    """Pooled output of a vision model. For one thread at a time."""

    def __init__(self, kind: Any, settings: ModelSettings, folder: Path, setting: str, num_threads: int) -> None:
        """Loads the model at `folder`, which `settings.{setting}` names; its processor is there or, for
        `settings.model`, at `settings.processor`."""
        self._processor = (folder, setting)
        if setting == "model":
            self._processor = (settings.processor_folder, settings.processor_setting)
        self.device = pick_device(settings.device)
        self._batch_size = settings.batch_size
        self._dtype = getattr(torch, settings.dtype)
        self._model = load_model(kind, settings, folder, setting, self.device)
        self._read = PictureReader(*self._processor, num_threads)

    @property
    def width(self) -> int:
        """Numbers in a vector."""
        return int(self._model.config.hidden_size)

    def embed(self, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        """(N, D) float32 unit vectors on the device, with gradient, of pixels (3, H, W) from 0 to 1 each."""
        return unit(self._run(torch.stack([self._read.differentiable(one) for one in pixels])).float())

    def pictures(self, pictures: Sequence[Image.Image]) -> torch.Tensor:
        """(N, D) float32 unit vectors on the CPU."""
        return unit(self.features(pictures))

    @torch.inference_mode()
    def features(self, pictures: Sequence[Image.Image]) -> torch.Tensor:
        """(N, D) float32 vectors on the CPU."""
        return in_batches(lambda part: self._run(self._read(part)), pictures, self._batch_size)

    def _run(self, pixels: torch.Tensor) -> torch.Tensor:
        with devices.bound(self.device):
            return self._pooled(pixels.to(self.device, self._dtype))

    def _pooled(self, pixels: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self._model(pixel_values=pixels).pooler_output
        return pooled


class ClipEncoder(PictureEncoder):
    """Pictures and texts to projected unit vectors of one CLIP model."""

    def __init__(self, settings: ModelSettings, folder: Path, setting: str, num_threads: int) -> None:
        super().__init__(CLIPModel, settings, folder, setting, num_threads)
        self._tokenizer = load_tokenizer(*self._processor)
        self._texts: LruCache[str, tuple[torch.Tensor, int]] = LruCache(MAX_PROMPTS)

    @property
    def width(self) -> int:
        return int(self._model.config.projection_dim)

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> tuple[torch.Tensor, list[int]]:
        """(N, D) float32 unit vectors on the CPU, and how many tokens of each text the model does not read."""
        known = {text: found for text in texts if (found := self._texts.get(text)) is not None}
        new = list(dict.fromkeys(text for text in texts if text not in known))
        for part in batches(new, self._batch_size):
            known.update(zip(part, self._embed_texts(part), strict=True))
        for text in dict.fromkeys(texts):
            self._texts.put(text, known[text])
        return torch.stack([known[text][0] for text in texts]), [known[text][1] for text in texts]

    def _pooled(self, pixels: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self._model.get_image_features(pixel_values=pixels).pooler_output
        return pooled

    def _embed_texts(self, texts: Sequence[str]) -> list[tuple[torch.Tensor, int]]:
        length = self._model.config.text_config.max_position_embeddings
        whole = self._tokenizer(list(texts), verbose=False).input_ids
        cut = self._tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        ).to(self.device)
        with devices.bound(self.device):
            output = self._model.get_text_features(input_ids=cut.input_ids, attention_mask=cut.attention_mask)
            vectors = unit(output.pooler_output.float().cpu())
        return [(vector, max(0, len(ids) - length)) for vector, ids in zip(vectors, whole, strict=True)]


def unit(vectors: torch.Tensor) -> torch.Tensor:
    """Each row by its length. A row of zeros becomes NaN, which the service refuses."""
    lengths: torch.Tensor = vectors.norm(dim=-1, keepdim=True)
    return vectors / lengths
