"""Base of the scorers whose model hears, and its feature extractor."""

from typing import Any, Generic, TypeVar

from transformers import AutoFeatureExtractor

from flowfleet.proto.reward_pb2 import MODALITY_SOUND
from services.reward.networks.checkpoints import check_checkpoint, check_processor
from services.reward.networks.torch_models import ModelScorer, ModelSettings, from_folder, load_model, pick_device

Settings = TypeVar("Settings", bound=ModelSettings)


class HearingScorer(ModelScorer[Settings], Generic[Settings]):
    """A scorer of sounds around a model of transformers."""

    modalities = (MODALITY_SOUND,)
    kind: Any
    """transformers' class of the model."""
    model_type: str

    def __init__(self, settings: Settings, num_threads: int) -> None:
        check_checkpoint(settings.model, "model", (self.model_type,))
        check_processor(settings.processor_folder, settings.processor_setting, tokenizer=True)
        place = settings.processor_folder, settings.processor_setting
        self._extractor = from_folder(AutoFeatureExtractor, *place, "feature extractor")
        self.sound_rate = int(self._extractor.sampling_rate)
        self.version, self.pinned = settings.version(1), settings.pinned
        super().__init__(settings, num_threads)
        self._model: Any = None

    def start(self) -> None:
        super().start()
        self._device = pick_device(self._settings.device)
        self._model = load_model(self.kind, self._settings, self._settings.model, "model", self._device)
