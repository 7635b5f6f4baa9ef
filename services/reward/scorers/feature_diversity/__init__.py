"""`feature_diversity`: how unlike the others of its group a picture is to a vision model, 0 … 2, as GARDO measures it.

The formula is that of the scorer `diversity`, with e the pooled output of a DINOv2, DINOv3 or CLIP image model. GARDO
takes DINOv3 ViT-L/16. Of a video e is the mean over at most 8 evenly spaced frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from transformers import AutoModel

from flowfleet.hardware import devices
from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_VIDEO
from services.reward.networks.checkpoints import check_checkpoint, check_processor
from services.reward.networks.torch_models import (
    ModelSettings,
    PictureReader,
    in_batches,
    load_model,
    pick_device,
    prepare_torch,
)
from services.reward.scorer import Outcome, PlainScorer, Sample
from services.reward.scorers.diversity import COMPONENTS, RANGE, group_scores

TYPES = ("dinov2", "dinov2_with_registers", "dinov3_vit", "clip_vision_model", "siglip_vision_model")


class FeatureDiversity(PlainScorer):
    """Component: `mean_distance` to all others of the group."""

    name = "feature_diversity"
    modalities = (MODALITY_IMAGE, MODALITY_VIDEO)
    score_range = RANGE
    components = COMPONENTS
    needs_group = True
    call_bytes = 0

    def __init__(self, settings: ModelSettings, num_threads: int) -> None:
        check_checkpoint(settings.model, "model", TYPES)
        check_processor(settings.processor_folder, settings.processor_setting, tokenizer=False)
        self.version, self.pinned = settings.version(1), settings.pinned
        self._settings, self._num_threads = settings, num_threads
        self._model: Any = None
        self._read: PictureReader

    def start(self) -> None:
        settings = self._settings
        prepare_torch(self._num_threads)
        self._device = pick_device(settings.device)
        self._model = load_model(AutoModel, settings, settings.model, "model", self._device)
        self._read = PictureReader(settings.processor_folder, settings.processor_setting, self._num_threads)

    @torch.inference_mode()
    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        pictures = [sample.pictures() for sample in samples]
        flat = [picture for part in pictures for picture in part]
        embedded = in_batches(self._embed, flat, self._settings.batch_size)
        features = torch.split(embedded, [len(part) for part in pictures])
        means = [part.mean(dim=0).numpy() for part in features]
        return group_scores(means, [sample.group_id for sample in samples])

    def _embed(self, pictures: Sequence[Image.Image]) -> torch.Tensor:
        with devices.bound(self._device):
            pixels = self._read(pictures).to(self._device, getattr(torch, self._settings.dtype))
            embeddings: torch.Tensor = self._model(pixel_values=pixels).pooler_output
        return embeddings


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> FeatureDiversity:
    """The scorer, of settings as `ModelSettings`. ValueError names the setting."""
    return FeatureDiversity(ModelSettings.read(settings), num_threads)
