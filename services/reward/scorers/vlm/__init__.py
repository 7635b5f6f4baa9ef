"""`vlm`: a vision-language model judges, behind an OpenAI-compatible server, by a rubric; see `services.reward.judge`.

Components of a pointwise rubric: `by_logprobs` (1 where the score comes from token probabilities, 0 where it was read
from the text), and then `mass` and `entropy`; in pairs `win_rate`, `comparisons` and `order_agreement` (1 where both
orders of a pair got the same answer); of rankings `rankings`, how many a sample was in.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_TEXT, MODALITY_VIDEO
from flowfleet.rewards.requests import EncodedSample
from services.reward.judge.judging import COMPONENTS, Judge, Questions
from services.reward.judge.metrics import JudgeMetrics
from services.reward.judge.rubrics import load_rubric
from services.reward.judge.settings import VlmSettings
from services.reward.scorer import AsyncScorer, Outcome, read_params

NoParams = tuple[()]


class VlmScorer(AsyncScorer[NoParams]):
    """Scores by a rubric; takes no parameters of the job."""

    name = "vlm"

    def __init__(self, settings: VlmSettings, metrics: JudgeMetrics | None = None) -> None:
        rubric = load_rubric(settings.rubric)
        self.version = f"1 ({settings.model}, {settings.rubric} {rubric.digest})"
        self.modalities = (MODALITY_TEXT,) if rubric.judges_text else (MODALITY_IMAGE, MODALITY_VIDEO)
        self.score_range = rubric.score_range
        self.components = COMPONENTS[rubric.mode]
        self.needs_group = rubric.mode != "pointwise"
        self._questions = Questions(settings, metrics or JudgeMetrics())
        self._judge = Judge(rubric, settings, self._questions)

    async def start(self) -> None:
        await self._questions.client.start()

    async def close(self) -> None:
        await self._questions.client.close()

    def parse(self, params: Mapping[str, str]) -> NoParams:
        read_params(params, {})
        return ()

    async def score(self, samples: Sequence[EncodedSample], params: NoParams) -> list[Outcome]:
        return await self._judge.score(samples)


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> VlmScorer:
    return VlmScorer(VlmSettings.read(settings))
