"""JSON formats of other projects' reward servers: the request for some samples, and where the answer has the scores.

Media travel as base64 of the file itself. Bodies are put together from bytes, because a JSON encoder would look at each
character of the media once more.

- `lists`: {"images", "prompts", "metadata", "params"}, parallel lists, to {"scores": […]}.
- `flow_grpo`: {"images", "prompts", "meta_datas"} to {"scores": […]}, or "outputs": the fields of flow_grpo's reward
  servers (github.com/yifan123/reward-server), in JSON.
- `verl_omni`: {"images", "prompts", "metadata": {}} to {"scores": […]}: the fields of verl-omni's HTTP scorer.
- `flow_factory`: {"image", "prompt", "kwargs", …} to {"rewards": […]}: what Flow-Factory's remote rewards speak.
- `single`: one sample: {"image", "media_type", "prompt", "metadata", "params"} to {"score": x, …}.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pybase64

from flowfleet.rewards.requests import EncodedSample
from services.reward.scorer import Outcome, Problem, Score, numbers_of

Fields = Callable[[Sequence[EncodedSample], Mapping[str, str]], dict[str, Any]]

BAD_ANSWER: Final = "bad_answer"
"""Reason of a Problem: the server answered, but gave this sample no number."""


class BadAnswer(ValueError):
    """An answer that says nothing about any sample."""


@dataclass(frozen=True)
class Shape:
    """Format of a server's requests and answers."""

    media: str
    """Field of the media."""
    fields: Fields
    """Makes the other fields."""
    answers: tuple[str, ...] = ("scores",)
    """Fields of the scores; the first that is there is taken."""
    single: bool = False
    """Sends one sample per request; media and score are not in lists."""

    def body(self, samples: Sequence[EncodedSample], params: Mapping[str, str], extra: Mapping[str, Any]) -> bytes:
        """Body of a request, as UTF-8."""
        files = [b'"%s"' % pybase64.b64encode(sample.media) for sample in samples]
        media = files[0] if self.single else b"[%s]" % b",".join(files)
        rest = json.dumps(self.fields(samples, params) | dict(extra), ensure_ascii=False).encode()
        return b'{"%s":%s,%s' % (self.media.encode(), media, rest[1:])

    def outcomes(self, answer: Any, number: int, components: Sequence[str]) -> list[Outcome]:
        """Reads the outcomes of `number` samples, in order, from a parsed answer. Raises BadAnswer if it has none."""
        if not isinstance(answer, Mapping):
            raise BadAnswer(f"JSON that is no object, but {answer!r:.80}")
        if answer.get("error"):
            raise BadAnswer(f"the error {answer['error']!r:.300}")
        if self.single:
            return [_outcome(answer, components)]
        name = next((name for name in self.answers if name in answer), None)
        if name is None:
            raise BadAnswer(f"no {' or '.join(self.answers)}, but {', '.join(map(str, answer)) or 'nothing':.200}")
        columns = {"score": answer[name]} | {one: answer[one] for one in components if one in answer}
        for one, column in columns.items():
            if not isinstance(column, list) or len(column) != number:
                what = f"{len(column)} values" if isinstance(column, list) else f"{column!r:.80}"
                raise BadAnswer(f"{what} as {name if one == 'score' else one} for {number} samples")
        return [_outcome({one: column[row] for one, column in columns.items()}, components) for row in range(number)]


def _outcome(numbers: Mapping[str, Any], components: Sequence[str]) -> Outcome:
    try:
        return Score(*numbers_of(numbers, components))
    except ValueError as error:
        return Problem(BAD_ANSWER, str(error))


def _prompts(samples: Sequence[EncodedSample]) -> list[str]:
    return [sample.prompt for sample in samples]


def _metadata(samples: Sequence[EncodedSample]) -> list[dict[str, str]]:
    return [dict(sample.metadata) for sample in samples]


def _lists(samples: Sequence[EncodedSample], params: Mapping[str, str]) -> dict[str, Any]:
    return {
        "media_types": [sample.media_type for sample in samples],
        "prompts": _prompts(samples),
        "metadata": _metadata(samples),
        "params": dict(params),
    }


def _flow_grpo(samples: Sequence[EncodedSample], params: Mapping[str, str]) -> dict[str, Any]:
    return {"prompts": _prompts(samples), "meta_datas": _metadata(samples), **params}


def _verl_omni(samples: Sequence[EncodedSample], params: Mapping[str, str]) -> dict[str, Any]:
    return {"prompts": _prompts(samples), "metadata": dict(params)}


def _flow_factory(samples: Sequence[EncodedSample], params: Mapping[str, str]) -> dict[str, Any]:
    absent = {"video": None, "condition_images": None, "condition_videos": None}
    return {"prompt": _prompts(samples), **absent, "kwargs": dict(params) or None}


def _single(samples: Sequence[EncodedSample], params: Mapping[str, str]) -> dict[str, Any]:
    (sample,) = samples
    return {
        "media_type": sample.media_type,
        "prompt": sample.prompt,
        "metadata": dict(sample.metadata),
        "params": dict(params),
    }


SHAPES: Final[Mapping[str, Shape]] = {
    "lists": Shape("images", _lists),
    "flow_grpo": Shape("images", _flow_grpo, ("scores", "outputs")),
    "verl_omni": Shape("images", _verl_omni),
    "flow_factory": Shape("image", _flow_factory, ("rewards",)),
    "single": Shape("image", _single, ("score",), single=True),
}
