"""`vlm_ocr`: a vision-language model transcribes, and what it read is compared with the text that the prompt quotes.

The question is "output only the text"; target, distance and score are those of `text`, as of `ocr`. Of a video, score
and components are the means over a few evenly spaced frames.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from flowfleet.media.files import MediaError
from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_VIDEO
from flowfleet.rewards.requests import EncodedSample
from services.reward.judge.judging import Questions, Refused
from services.reward.judge.media import Picture
from services.reward.judge.metrics import JudgeMetrics
from services.reward.judge.settings import JudgeSettings
from services.reward.scorer import AsyncScorer, Outcome, Problem, Score, boolean, mean_score, read_params
from services.reward.text import normalize, target_of, text_distance

QUESTION = "Please output only the text content from the image without any additional descriptions or formatting."


class VlmOcrSettings(JudgeSettings):
    """Settings of `vlm_ocr`."""

    question: str = QUESTION
    """Question after the picture."""
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 256
    """Maximum tokens of the transcript."""
    num_frames: Annotated[int, Field(ge=1, le=64)] = 4
    """Frames per video."""


class VlmOcrScorer(AsyncScorer[bool]):
    """Takes `params.alphanumeric` as `ocr` does. Components: `exact` (1 where the target is contained) and `distance`
    (characters)."""

    name = "vlm_ocr"
    modalities = (MODALITY_IMAGE, MODALITY_VIDEO)
    score_range = (0.0, 1.0)
    components = ("exact", "distance")

    def __init__(self, settings: VlmOcrSettings, metrics: JudgeMetrics | None = None) -> None:
        self._settings = settings
        asked = "" if settings.question == QUESTION else ", own question"
        self.version = f"1 ({settings.model}{asked})"
        self._questions = Questions(settings, metrics or JudgeMetrics())

    async def start(self) -> None:
        await self._questions.client.start()

    async def close(self) -> None:
        await self._questions.client.close()

    def parse(self, params: Mapping[str, str]) -> bool:
        return bool(read_params(params, {"alphanumeric": boolean}).get("alphanumeric", False))

    async def score(self, samples: Sequence[EncodedSample], params: bool) -> list[Outcome]:
        outcomes = await asyncio.gather(*(self._score(sample, params) for sample in samples))
        return self._questions.unless_broken(outcomes, "settings.question")

    async def _score(self, sample: EncodedSample, alphanumeric: bool) -> Outcome:
        try:
            target = target_of(sample.prompt, alphanumeric)
            async with self._questions.samples.take(1):
                pictures = await self._questions.pictures_of(sample, self._settings.num_frames)
                texts = await asyncio.gather(*(self._transcribe(picture) for picture in pictures))
        except Refused as refused:
            return refused.problem
        except MediaError as error:
            return Problem(error.reason, str(error))
        except ValueError as error:
            return Problem("prompt", str(error))
        return mean_score([_compared(text, target, alphanumeric) for text in texts])

    async def _transcribe(self, picture: Picture) -> str:
        params = {"max_tokens": self._settings.max_tokens}
        return await self._questions.ask("", [picture, self._settings.question], params, lambda answer: answer.text)


def _compared(text: str, target: str, alphanumeric: bool) -> Score:
    distance = text_distance(normalize(text, alphanumeric), target)
    return Score(1.0 - distance / len(target), {"exact": float(distance == 0), "distance": float(distance)})


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> VlmOcrScorer:
    return VlmOcrScorer(VlmOcrSettings.read(settings))
