from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from PIL import Image

from flowfleet.errors import Unavailable
from flowfleet.media.files import encode_media
from flowfleet.proto.reward_pb2 import MODALITY_VIDEO, RewardSample
from flowfleet.rewards.requests import EncodedSample
from services.reward.execution import decoding, evaluator
from services.reward.execution.decoding import Opened
from services.reward.execution.evaluator import Evaluator, finite, unless_all_failed
from services.reward.scorer import Outcome, Problem, Sample, Score, ScoreGradient, Scorer
from tests.services.reward.pictures import sample


class Lookup(Scorer[None]):
    """Scores a prompt by a function of the test and keeps the batches it saw."""

    name, version, score_range, components = "lookup", "1", (0.0, 1.0), ("a",)

    def __init__(self, of: Callable[[str], Outcome]) -> None:
        self.of = of
        self.batches: list[list[str]] = []

    def parse(self, params: Mapping[str, str]) -> None:
        return None

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        self.batches.append([sample.prompt for sample in samples])
        return [self.of(sample.prompt) for sample in samples]


def evaluate(scorer: Lookup, samples: Sequence[RewardSample], num_threads: int = 2) -> list[Outcome]:
    run = Evaluator(scorer, num_threads)
    outcomes = run([EncodedSample.of(sample) for sample in samples], None)
    run.close()
    return outcomes


def samples(*prompts: str) -> list[RewardSample]:
    return [sample(prompt, Image.new("RGB", (8, 8)), prompt) for prompt in prompts]


def by_float(prompt: str) -> Outcome:
    return Score(float(prompt))


def test_outcomes_keep_the_order_around_bad_pictures() -> None:
    batch = samples("0.1", "0.2", "0.3")
    batch.insert(1, RewardSample(sample_id="x", media=b"junk", media_type="image/png", prompt="0.9"))
    outcomes = evaluate(Lookup(by_float), batch)
    assert [outcomes[index] for index in (0, 2, 3)] == [Score(0.1), Score(0.2), Score(0.3)]
    assert isinstance(outcomes[1], Problem)


def test_nothing_decodable_never_reaches_the_scorer() -> None:
    scorer = Lookup(by_float)
    outcomes = evaluate(scorer, [RewardSample(media=b"junk", media_type="image/png")])
    assert scorer.batches == []
    assert isinstance(outcomes[0], Problem)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_scores_and_components_become_problems(value: float) -> None:
    for outcome in (Score(value), Score(0.5, {"a": value})):
        found = finite(outcome)
        assert isinstance(found, Problem)
        assert found.reason == "non_finite"
        assert str(value) in found.message
    outcomes = evaluate(Lookup(by_float), samples("0.5", str(value), "0.25"))
    assert [isinstance(outcome, Problem) for outcome in outcomes] == [False, True, False]


def test_a_sample_on_which_the_scorer_raises_is_alone_in_it() -> None:
    outcomes = evaluate(Lookup(by_float), samples("0.5", "poison", "0.25"))
    assert [outcomes[0], outcomes[2]] == [Score(0.5), Score(0.25)]
    assert isinstance(outcomes[1], Problem)
    assert outcomes[1].reason == "scorer_failed"


def test_a_scorer_that_fails_on_everything_is_unavailable() -> None:
    failed, died, refused = (Problem(reason, "") for reason in ("scorer_failed", "scorer_died", "undecodable"))
    for outcomes in ([failed, failed], [failed, refused, died]):
        with pytest.raises(Unavailable, match="all 2 samples"):
            unless_all_failed("lookup", outcomes)
    fine: list[list[Outcome]] = [[failed], [failed, refused], [failed, failed, Score(0.5)], [refused, refused], []]
    for others in fine:
        unless_all_failed("lookup", others)
    unless_all_failed("lookup", [failed, failed, ScoreGradient(0.5, np.zeros((3, 2, 2), np.float32))])


def test_a_wrong_number_of_outcomes_is_a_failure() -> None:
    class Forgetful(Lookup):
        def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
            return super().score(samples, params)[: 1 if len(samples) > 1 else None]

    assert evaluate(Forgetful(by_float), samples("0.5", "0.25")) == [Score(0.5), Score(0.25)]


def test_videos_reach_only_scorers_that_take_them() -> None:
    class OfVideos(Lookup):
        modalities = (MODALITY_VIDEO,)

    media, media_type = encode_media(np.zeros((3, 16, 16, 3), np.uint8))
    video = RewardSample(sample_id="v", media=media, media_type=media_type, prompt="0.5")
    for scorer, scored in ((Lookup(by_float), 1), (OfVideos(by_float), 0)):
        outcomes = evaluate(scorer, [video, *samples("0.25")])
        assert isinstance(outcomes[scored], Score)
        refused = outcomes[1 - scored]
        assert isinstance(refused, Problem)
        assert refused.reason == "media_type"
        assert len(scorer.batches) == 1


def test_all_frames_count_in_what_is_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfVideos(Lookup):
        modalities = (MODALITY_VIDEO,)

    monkeypatch.setattr(evaluator, "MAX_DECODED_PIXELS", 2 * 3 * 256)
    media, media_type = encode_media(np.zeros((3, 16, 16, 3), np.uint8))
    scorer = OfVideos(by_float)
    evaluate(scorer, [RewardSample(media=media, media_type=media_type, prompt=f"0.{digit}") for digit in range(5)])
    assert [len(batch) for batch in scorer.batches] == [2, 2, 1]


def test_few_pixels_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "MAX_DECODED_PIXELS", 3 * 64)
    scorer = Lookup(by_float)
    prompts = [f"0.{digit}" for digit in range(1, 8)]
    assert evaluate(scorer, samples(*prompts)) == [Score(float(prompt)) for prompt in prompts]
    assert [len(batch) for batch in scorer.batches] == [3, 3, 1]


def test_of_what_is_begun_the_first_part_is_decoded_unless_it_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "MAX_DECODED_PIXELS", 2 * 64)
    small, large = samples("0.5", "0.25", "0.75"), [sample("x", Image.new("RGB", (16, 16)), "0.1"), *samples("0.2")]
    small.insert(1, RewardSample(media=b"junk", media_type="image/png"))
    run = Evaluator(Lookup(by_float), 0)
    for batch, max_pixels, ahead in ((small, 128, [True, False]), (small, 127, [False] * 2), (large, 128, [False] * 2)):
        given = [EncodedSample.of(sample) for sample in batch]
        parts = run.begin(given, max_pixels)
        assert [part.decoded is not None for part in parts] == ahead
        assert run.finish(parts, None) == run(given, None)
        assert not any(part.items or part.decoded for part in parts)


class OfLargeBatches(Lookup):
    call_bytes = 0


@pytest.mark.parametrize(
    ("kind", "num_threads", "number", "parts"),
    [
        (Lookup, 2, 4, [4]),
        (Lookup, 2, 5, [3, 2]),
        (Lookup, 1, 9, [3, 3, 3]),
        (Lookup, 0, 9, [9]),
        (OfLargeBatches, 2, 4, [4]),
        (OfLargeBatches, 1, 9, [5, 4]),
        (OfLargeBatches, 2, 16, [8, 8]),
        (OfLargeBatches, 0, 16, [16]),
    ],
)
def test_a_batch_is_taken_in_equal_parts(kind: type[Lookup], num_threads: int, number: int, parts: list[int]) -> None:
    scorer = kind(by_float)
    prompts = [f"0.{index:02}" for index in range(number)]
    assert evaluate(scorer, samples(*prompts), num_threads) == [Score(float(prompt)) for prompt in prompts]
    assert [len(batch) for batch in scorer.batches] == parts


def test_the_next_part_is_decoded_while_one_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = threading.Event()

    def decode(opened: Opened) -> Sample | Problem:
        if opened.sample.prompt == "0.8":
            decoded.set()
        return decoding.decode(opened)

    class Waiting(Lookup):
        def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
            assert decoded.wait(60.0)
            return super().score(samples, params)

    monkeypatch.setattr(evaluator, "decode", decode)
    scorer = Waiting(by_float)
    evaluate(scorer, samples(*(f"0.{digit}" for digit in range(1, 9))), 1)
    assert [len(batch) for batch in scorer.batches] == [4, 4]


def test_a_long_video_is_in_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfVideos(Lookup):
        modalities = (MODALITY_VIDEO,)

        def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
            seen.append(len(decoded))
            return super().score(samples, params)

    def decode(opened: Opened) -> Sample | Problem:
        decoded.append(opened.sample.prompt)
        return decoding.decode(opened)

    seen: list[int] = []
    decoded: list[str] = []
    monkeypatch.setattr(evaluator, "decode", decode)
    monkeypatch.setattr(evaluator, "MAX_DECODED_PIXELS", 3 * 256 - 1)
    media, media_type = encode_media(np.zeros((3, 16, 16, 3), np.uint8))
    videos = [RewardSample(media=media, media_type=media_type, prompt=f"0.{digit}") for digit in range(4)]
    assert evaluate(OfVideos(by_float), videos) == [Score(digit / 10) for digit in range(4)]
    assert seen == [1, 2, 3, 4]
