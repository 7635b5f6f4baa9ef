"""`clap`: how well a sound fits its prompt, by a CLAP model (transformers' ClapModel), -1 … 1.

cos(sound embedding, text embedding), both projected (Wu et al., arXiv 2211.06687). The first seconds count that the
model hears, 10 as a rule. The text is `sound` in the metadata of the prompt's line, where it is there, else the prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import ClapModel

from flowfleet.hardware import devices
from services.reward.networks.encoders import unit
from services.reward.networks.hearing import HearingScorer
from services.reward.networks.torch_models import ModelSettings, batches, load_tokenizer
from services.reward.scorer import Outcome, Problem, Sample, Score


class Clap(HearingScorer[ModelSettings]):
    """Component: `cosine`."""

    name = "clap"
    kind = ClapModel
    model_type = "clap"
    score_range = (-1.0, 1.0)
    components = ("cosine",)

    def start(self) -> None:
        super().start()
        self._tokenizer = load_tokenizer(self._settings.processor_folder, self._settings.processor_setting)

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        outcomes: dict[int, Outcome] = dict.fromkeys(range(len(samples)), Problem("silent", "the sound has no samples"))
        heard = [place for place, sample in enumerate(samples) if len(sample.sound)]
        for part in batches(heard, self._settings.batch_size):
            cosines = self._cosines([samples[place] for place in part])
            outcomes |= {place: Score(one, {"cosine": one}) for place, one in zip(part, cosines, strict=True)}
        return [outcomes[place] for place in range(len(samples))]

    @torch.inference_mode()
    def _cosines(self, samples: Sequence[Sample]) -> list[float]:
        texts = [sample.metadata.get("sound") or sample.prompt for sample in samples]
        read = self._tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(self._device)
        most = int(self._extractor.nb_max_samples)
        sounds = [sample.sound[:most] for sample in samples]
        features = self._extractor(sounds, sampling_rate=self.sound_rate, return_tensors="pt")
        with devices.bound(self._device):
            spectra = features["input_features"].to(self._device, self._model.dtype)
            longer = features["is_longer"].to(self._device)
            heard = self._model.get_audio_features(input_features=spectra, is_longer=longer).pooler_output
            meant = self._model.get_text_features(**read).pooler_output
        cosines = (unit(heard.float().cpu()) * unit(meant.float().cpu())).sum(dim=1)
        return [float(one) for one in cosines.clamp(-1, 1)]


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> Clap:
    return Clap(ModelSettings.read(settings), num_threads)
