"""Base of the scorers of answers: finds the reference in the metadata, and the part of an answer that counts."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flowfleet.proto.reward_pb2 import MODALITY_TEXT
from services.reward.scorer import Outcome, Problem, Sample, Score, Scorer, read_params

MISSING: Final = "reference"
"""Reason of a sample whose metadata lack the reference answer."""


@dataclass(frozen=True)
class AnswerParams:
    """Parameters of a job."""

    field: str = "answer"
    """Metadata field with the reference, or a JSON list of accepted ones."""
    after: str = ""
    """Mark such as "####": only the text after the last one counts, and none scores 0."""


READERS: Final = {"field": str, "after": str}


class AnswerScorer(Scorer[AnswerParams]):
    """Scores 1 if an answer agrees with a reference, else 0."""

    version = "1"
    modalities = (MODALITY_TEXT,)
    score_range = (0.0, 1.0)
    components = ("found",)
    call_bytes = 0

    def parse(self, params: Mapping[str, str]) -> AnswerParams:
        return AnswerParams(**read_params(params, READERS))

    def score(self, samples: Sequence[Sample], params: AnswerParams) -> list[Outcome]:
        return [self._outcome(sample, params) for sample in samples]

    @abstractmethod
    def find(self, text: str) -> Any:
        """The final answer within the text, or None."""

    @abstractmethod
    def agrees(self, found: Any, reference: str) -> bool:
        """True if a final answer agrees with the reference. Raises ValueError if the reference cannot be compared."""

    def _outcome(self, sample: Sample, params: AnswerParams) -> Outcome:
        try:
            accepted = references(sample.metadata, params.field)
            _, mark, text = sample.text.rpartition(params.after) if params.after else ("", "all", sample.text)
            found = self.find(text) if mark else None
            is_right = found is not None and any(self.agrees(found, reference) for reference in accepted)
        except ValueError as error:
            return Problem(MISSING, str(error))
        return Score(float(is_right), {"found": float(found is not None)})


def references(metadata: Mapping[str, str], field: str) -> list[str]:
    """The accepted answers. Raises ValueError if the metadata have none."""
    given = metadata.get(field, "").strip()
    if not given:
        known = ", ".join(sorted(metadata)) or "none"
        raise ValueError(
            f"the prompt has no reference answer in the metadata field {field!r} (its fields: {known}): "
            "add the column, or name another by params.field"
        )
    if given.startswith("["):
        try:
            listed = json.loads(given)
        except ValueError:
            return [given]
        if isinstance(listed, list) and listed and all(isinstance(one, str | int | float) for one in listed):
            return [str(one) for one in listed]
    return [given]
