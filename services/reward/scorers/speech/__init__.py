"""`speech`: are the words said that the prompt's line names? By a Whisper model, 0 … 1.

score = max(0, 1 - WER), with WER the least number of words to insert, delete or replace, divided by the words that were
to be said. These are `speech` in the metadata of the prompt's line, or else what the prompt has in quotes. Both texts
lose punctuation and upper case, as Whisper's basic normalizer does. The first 30 s count.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from rapidfuzz.distance import Levenshtein
from transformers import WhisperForConditionalGeneration

from flowfleet.hardware import devices
from services.reward.networks.hearing import HearingScorer
from services.reward.networks.torch_models import ModelSettings, batches, load_tokenizer
from services.reward.scorer import Outcome, Problem, Sample, Score

_BEGINS = 8
"""Tokens that begin a transcript, at most."""
_QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”')


class SpeechSettings(ModelSettings):
    """Settings of `speech`."""

    language: str = "en"
    """Language of the speech, for models of several."""
    max_tokens: int = Field(default=128, ge=1, le=440)
    """Maximum tokens of a transcript."""


class Speech(HearingScorer[SpeechSettings]):
    """Components: `word_errors`, `words`."""

    name = "speech"
    kind = WhisperForConditionalGeneration
    model_type = "whisper"
    score_range = (0.0, 1.0)
    components = ("word_errors", "words")

    def start(self) -> None:
        super().start()
        self._tokenizer = load_tokenizer(self._settings.processor_folder, self._settings.processor_setting)

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        wanted = [self._words(wanted_of(sample)) for sample in samples]
        told = [place for place, words in enumerate(wanted) if words]
        said: dict[int, list[str]] = {}
        for part in batches(told, self._settings.batch_size):
            said |= zip(part, map(self._words, self.transcripts([samples[place] for place in part])), strict=True)
        missing = Problem("metadata", "no words are to be said: give metadata speech, or quote them in the prompt")
        return [_judged(words, said[place]) if words else missing for place, words in enumerate(wanted)]

    @torch.inference_mode()
    def transcripts(self, samples: Sequence[Sample]) -> list[str]:
        """Texts of the sounds, by the likeliest token each."""
        features = self._extractor(
            [sample.sound for sample in samples], sampling_rate=self.sound_rate, return_tensors="pt"
        )
        speaks = getattr(self._model.generation_config, "is_multilingual", False)
        named = {"language": self._settings.language, "task": "transcribe"} if speaks else {}
        with devices.bound(self._device):
            tokens = self._model.generate(
                features["input_features"].to(self._device, self._model.dtype),
                max_new_tokens=min(self._settings.max_tokens, self._model.config.max_target_positions - _BEGINS),
                do_sample=False,
                num_beams=1,
                **named,
            )
        texts: list[str] = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return texts

    def _words(self, text: str) -> list[str]:
        return str(self._tokenizer.basic_normalize(text)).split()


def wanted_of(sample: Sample) -> str:
    """The text that is to be said; empty where there is none."""
    quoted = " ".join(one or other for one, other in _QUOTED.findall(sample.prompt))
    return sample.metadata.get("speech") or quoted


def _judged(wanted: list[str], said: list[str]) -> Score:
    errors = Levenshtein.distance(wanted, said)
    return Score(max(0.0, 1 - errors / len(wanted)), {"word_errors": float(errors), "words": float(len(wanted))})


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> Speech:
    return Speech(SpeechSettings.read(settings), num_threads)
