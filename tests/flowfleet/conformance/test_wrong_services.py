"""A service that keeps the contract passes; each of the wrong ones fails the check of its rule, and no other."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flowfleet.conformance import Report, Status
from tests.flowfleet.conformance import services
from tests.flowfleet.conformance.services import Right, describes, report_on

WRONG: list[tuple[Callable[[], Right], str, str]] = [
    (services.NotServing, "health", "NOT_SERVING"),
    (services.WithoutHealth, "health", "add the standard health service"),
    (describes(version=""), "describe", "version is empty"),
    (describes(contract=3), "contract", "speaks contract 3, this Flowfleet 2: upgrade Flowfleet"),
    (describes(modalities=[1, 9]), "modalities", "modality 9"),
    (describes(score_min=1.0), "score range", "score_min is 1, score_max 1"),
    (describes(components=["mean", "mean"]), "component names", "'mean' is named twice"),
    (services.DescribesAnew, "describe again", "changed between calls: version"),
    (services.RefusesAll, "one sample", "no target"),
    (services.RefusesFullBatches, "full batch", "8 samples: INVALID_ARGUMENT: at most 7"),
    (services.ForgetsOne, "each id once", "1 of 8 are missing"),
    (services.AnswersTwice, "each id once", "answered 2 times"),
    (services.InventsIds, "each id once", "'of another call' was not asked for"),
    (services.ForgetsLateOnes, "each id once", "32 of 64 are missing, first sample 33"),
    (services.LeavesLateOnesEmpty, "each id once", "44 of 64 have neither score nor error, first sample 21"),
    (services.ShiftsLargeCalls, "large call in order", "in a small call"),
    (services.TellsWrongSizes, "media size", "its score is of"),
    (services.MixesUp, "order and company", "before"),
    (services.SeesOneGroup, "groups", "missing in the answer"),
    (services.AsciiOnly, "unicode", "UnicodeEncodeError"),
    (services.ShortPrompts, "long prompt", "INTERNAL: buffer overrun"),
    (services.StrictParser, "newer fields", "an unknown field"),
    (services.TakesAnyNumber, "too many samples", "end it with INVALID_ARGUMENT or RESOURCE_EXHAUSTED"),
    (services.RefusesWithoutWords, "too many samples", "without a message"),
    (services.TakesDuplicates, "duplicate ids", "the call was answered"),
    (services.TakesEmptyIds, "empty id", "the call was answered"),
    (services.CrashesOnNothing, "empty call", "INTERNAL: list index out of range"),
    (services.IgnoresParams, "unknown param", "the call was answered"),
    (services.FailsWholeCalls, "broken media", "give an error to that sample alone"),
    (services.ZeroForBroken, "broken media", "score 0; it must get an error"),
    (services.GuessesTypes, "unknown media type", "it must get an error"),
    (services.TrustsHeaders, "huge picture", "score 0.5; it must get an error"),
    (services.SmallMessages, "large call", "raise the limit of a message"),
    (services.ScoresVideosByAccident, "the other modality", "score 0.5; it must get an error"),
    (services.SharesState, "many at once", "missing in the answer"),
    (services.NotANumber, "finite", "score nan"),
    (services.OutOfRange, "in range", "not 0 to 0.25"),
    (services.StrangeComponent, "components", "'surprise' is not among those of Describe: mean"),
    (services.BrokenComponent, "components", "mean is nan"),
    (services.WaitsUnannounced, "pending", "name 2, so that controllers that cannot wait refuse it"),
    (services.WaitsInSilence, "pending", "pending is empty"),
    (services.OldContract, "gradient contract", "contract is below 2"),
    (services.Transposed, "gradients", "its pixels have (3,"),
    (services.HalfAsFast, "gradient is right", "all pixels: the gradient promises a rise of"),
    (services.RightInTheMiddle, "gradient is right", "the gradient promises a rise of"),
    (services.MeanOfTheCall, "gradient of each", "is another alone than in a call of 3"),
    (services.ZeroForBrokenPixels, "broken pixels", "pixels of shape (4, 4) got a score"),
    (services.SmallPictures, "large pictures", "out of memory"),
]

GRADIENTS = (
    "gradient contract",
    "gradients",
    "gradient is right",
    "gradient of each",
    "gradient score",
    "broken pixels",
    "large pictures",
)
"""Checks of a service that gives gradients."""

CONTRACT = {
    "reachable": "service RewardService",
    "health": 'grpc.health.v1.Health, which says SERVING for ""',
    "describe": "string name = 1; not empty string version = 2; not empty",
    "contract": "of this file: 1; 0 counts as 1; 2 where a score may be pending",
    "modalities": "pictures, videos, texts, sounds; none counts as pictures",
    "score range": "below score_max; -infinity where there is no bound",
    "component names": "names it may return, each once",
    "batch limit": "At least 2 where needs_group is set",
    "describe again": "The same answer each time",
    "one sample": "One score a sample",
    "full batch": "samples in one call",
    "each id once": "each sample once and no other",
    "same again": "not on the place in the call, the size of the call, or the calls before",
    "order and company": "A score depends on its own sample alone, or on its group",
    "large call in order": "not on the place in the call, the size of the call",
    "media size": "bytes of the media that this score was computed from",
    "groups": "A call may have several groups, mixed",
    "unicode": "any Unicode text",
    "long prompt": "where it is too long, this sample gets an error",
    "newer fields": "ignores unknown fields",
    "too many samples": "More than max_batch_size: INVALID_ARGUMENT or RESOURCE_EXHAUSTED",
    "duplicate ids": "Two of one id in a call, or an empty one: INVALID_ARGUMENT",
    "empty id": "Two of one id in a call, or an empty one: INVALID_ARGUMENT",
    "empty call": "none: INVALID_ARGUMENT, or an empty answer",
    "unknown param": "One that is not known: INVALID_ARGUMENT that names it",
    "broken media": "this sample gets an error, and the others of the call their scores",
    "truncated media": "broken, truncated, huge",
    "unknown media type": "an error for one that is not read",
    "huge picture": "a PNG may promise 30,000 x 30,000 pixels",
    "big picture": "A sample that cannot be scored gets an `error`",
    "jpeg": '"image/png", "image/jpeg"',
    "large call": "takes messages of 64 MiB (gRPC's own default is 4 MiB)",
    "the other modality": "of a modality that is not scored, this sample gets an error",
    "many at once": "Calls come many at once, and each gets its own scores",
    "deadline": "hundreds of abandoned calls do not hold up the next one",
    "cancellation": "It stops work that was cancelled or is past its deadline",
    "finite": "finite, from score_min to score_max",
    "in range": "finite, from score_min to score_max",
    "components": "finite, of the names in Describe",
    "no gradients": "A service that does not say gives_gradient needs no such method",
    "gradient contract": "2 where a score may be pending, or where gives_gradient is set",
    "gradients": "float32, finite, of the pixels' shape",
    "gradient is right": "by how much the score in this message rises per unit of each pixel",
    "gradient of each": "The rules of Score hold",
    "gradient score": "Of the same picture it may differ from Score's by what rounding to 8 bits does",
    "broken pixels": "Where it is anything else, this sample gets an error",
    "large pictures": "A picture before it is rounded to 8 bits: 3.1 MB at 512 x 512",
    "pending": "what the score waits for, as people have yet to judge; not empty",
    "afterwards": "hundreds of abandoned calls do not hold up the next one",
}


@pytest.fixture(scope="module")
def right() -> Report:
    return report_on(Right())


def test_a_right_service_passes_everything(right: Report) -> None:
    assert right.failed == []
    noted = {result.name: result.detail for result in right.results if result.status is not Status.PASS}
    for name in ("deadline", "cancellation"):  # where the machine was slow once, all calls may be answered sooner
        assert "nothing was tested" in noted.pop(name, "nothing was tested")
    for name in GRADIENTS:
        assert noted.pop(name) == "gives_gradient is not set"
    assert noted == {"jpeg": """error "ValueError('image/jpeg is not read')\""""}


def test_a_right_service_with_gradients_passes_their_checks() -> None:
    report = report_on(services.Gradients())
    assert report.failed == [], report.text()
    assert [name for name in GRADIENTS if report.result(name).status is not Status.PASS] == []
    assert report.result("no gradients").status is Status.SKIP


@pytest.mark.parametrize(("make", "name", "words"), WRONG, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_service_fails_for_the_right_reason(make: Callable[[], Right], name: str, words: str) -> None:
    report = report_on(make())
    assert report.failed == [name], report.text()
    assert words in report.result(name).detail


def test_calls_that_were_left_hold_up_the_next() -> None:
    """Ten calls of 0.4 s are a backlog of 4 s, of which a busy machine may use up a part before the next call."""
    report = report_on(services.OneQueue(), dataclasses.replace(services.OPTIONS, allowed_s=1.0, num_abandoned=10))
    assert report.failed == ["deadline", "cancellation"], report.text()
    assert "stop calls that were cancelled" in report.result("deadline").detail


def test_many_threads_that_work_for_nobody_hold_up_the_next() -> None:
    """128 calls of 0.3 s on 16 threads are a backlog of 2.4 s; a call of one sample takes milliseconds."""
    options = dataclasses.replace(services.OPTIONS, allowed_s=0.5, num_abandoned=128)
    report = report_on(services.ManyThreads(), options)
    assert {"deadline", "cancellation"} <= set(report.failed), report.text()


def test_a_check_that_tested_nothing_is_no_pass() -> None:
    report = report_on(services.Unmarked(), dataclasses.replace(services.OPTIONS, num_abandoned=0))
    assert report.failed == []
    found = {result.name: (result.status, result.detail) for result in report.results}
    for name in ("deadline", "cancellation"):
        assert found[name][0] is Status.NOTE
        assert found[name][1].startswith("0 of 0")
    assert found["media size"][0] is Status.NOTE
    assert found["components"][0] is Status.SKIP


def test_a_service_that_waits_for_people_passes() -> None:
    report = report_on(services.Waits())
    assert report.failed == [], report.text()
    assert report.result("one sample").status is Status.NOTE
    assert "pending 'two of four votes'" in report.result("one sample").detail
    assert report.result("pending").status is Status.PASS


def test_infinite_scores_fail_and_do_not_crash_the_suite() -> None:
    report = report_on(services.AlwaysInfinite())
    assert "finite" in report.failed
    assert report.result("in range").status is Status.SKIP


def test_each_check_stands_on_words_of_the_contract(right: Report) -> None:
    """Whoever writes a service from the proto alone knows what it will be asked."""
    proto = (Path(__file__).parents[3] / "protos/flowfleet/v1/reward.proto").read_text()
    words = " ".join(proto.replace("//", " ").split())
    assert {result.name for result in right.results} == CONTRACT.keys()
    for name, phrase in CONTRACT.items():
        assert phrase in words, f"{name}: the contract does not say {phrase!r}"


@pytest.mark.long
def test_how_long_they_may_is_an_option() -> None:
    """12 calls of 0.4 s, and a machine that is in no hurry."""
    assert report_on(services.OneQueue(), dataclasses.replace(services.OPTIONS, allowed_s=60.0)).failed == []


def test_what_stands_on_a_broken_rule_is_not_asked() -> None:
    report = report_on(services.RefusesAll())
    assert report.result("full batch").status is Status.SKIP
    assert report.result("full batch").detail == "needs 'one sample', which did not pass"


def test_noise_is_noted_and_forbidden_to_nobody() -> None:
    report = report_on(services.Dice())
    assert report.failed == [], report.text()
    assert report.result("same again").status is Status.NOTE
    assert "scores are noisy" in report.result("same again").detail


def test_every_check_has_a_wrong_service(right: Report) -> None:
    """But for those that only describe, or note."""
    covered = {name for _, name, _ in WRONG} | {"deadline", "cancellation"}
    elsewhere = {"reachable", "batch limit", "same again", "truncated media", "big picture", "jpeg", "afterwards"}
    elsewhere |= {"no gradients", "gradient score"}
    assert {result.name for result in right.results} == covered | elsewhere


def test_the_report_reads_and_is_json(right: Report) -> None:
    assert "gray 1, pictures, scores 0 to 1, at most 8 a call, contract 1" in right.text()
    skipped = [result.name for result in right.results if result.status is Status.SKIP]
    assert re.search(rf"passed, [123] noted, {len(skipped)} skipped, in", right.text())
    found = json.loads(right.model_dump_json())
    assert {"name": "describe", "status": "pass"}.items() <= found["results"][2].items()
