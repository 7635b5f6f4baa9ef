"""`feature_diversity`: how unlike the others of its group a picture is to a vision model, 0 … 2, as GARDO measures it.

The formula is that of the scorer `diversity`, with e the pooled output of a DINOv2, DINOv3 or CLIP image model. GARDO
takes DINOv3 ViT-L/16. Of a video e is the mean over at most 8 evenly spaced frames.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModel

from services.reward.networks.checkpoints import check_checkpoint, check_processor
from services.reward.networks.encoders import PictureEncoder
from services.reward.networks.torch_models import ModelScorer, ModelSettings
from services.reward.scorer import Outcome, Sample
from services.reward.scorers.diversity import COMPONENTS, RANGE, group_scores

TYPES = ("dinov2", "dinov2_with_registers", "dinov3_vit", "clip_vision_model", "siglip_vision_model")


class FeatureDiversity(ModelScorer[ModelSettings]):
    """Component: `mean_distance` to all others of the group."""

    name = "feature_diversity"
    score_range = RANGE
    components = COMPONENTS
    needs_group = True

    def __init__(self, settings: ModelSettings, num_threads: int) -> None:
        check_checkpoint(settings.model, "model", TYPES)
        check_processor(settings.processor_folder, settings.processor_setting, tokenizer=False)
        self.version, self.pinned = settings.version(1), settings.pinned
        super().__init__(settings, num_threads)
        self._encoder: PictureEncoder

    def start(self) -> None:
        super().start()
        self._encoder = PictureEncoder(AutoModel, self._settings, self._settings.model, "model", self._num_threads)

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        pictures = [sample.pictures() for sample in samples]
        features = self._encoder.features([picture for part in pictures for picture in part])
        parts = torch.split(features, [len(part) for part in pictures])
        return group_scores([part.mean(dim=0).numpy() for part in parts], [sample.group_id for sample in samples])


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> FeatureDiversity:
    return FeatureDiversity(ModelSettings.read(settings), num_threads)
