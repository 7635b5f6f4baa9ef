"""A service that keeps the contract passes; each of the wrong ones fails the check of its rule, and no other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

from flowfleet.conformance import Report, Status
from tests.flowfleet.conformance import services
from tests.flowfleet.conformance.services import Right, describes, report_on

WRONG: list[tuple[Callable[[], Right], str, str]] = [
    (services.NotServing, "health", "NOT_SERVING"),
    (services.WithoutHealth, "health", "add the standard health service"),
    (describes(version=""), "describe", "version is empty"),
    (describes(contract=2), "contract", "speaks contract 2, this Flowfleet 1: upgrade Flowfleet"),
    (describes(modalities=[1, 9]), "modalities", "modality 9"),
    (describes(score_min=1.0), "score range", "score_min is 1, score_max 1"),
    (describes(components=["mean", "mean"]), "component names", "'mean' is named twice"),
    (services.DescribesAnew, "describe again", "changed between calls: version"),
    (services.RefusesAll, "one sample", "no target"),
    (services.RefusesFullBatches, "full batch", "8 samples: INVALID_ARGUMENT: at most 7"),
    (services.ForgetsOne, "each id once", "1 of 8 are missing"),
    (services.AnswersTwice, "each id once", "answered 2 times"),
    (services.InventsIds, "each id once", "'of another call' was not asked for"),
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
    (services.SharesState, "many at once", "before"),
    (services.NotANumber, "finite", "score nan"),
    (services.OutOfRange, "in range", "not 0 to 0.25"),
    (services.StrangeComponent, "components", "'surprise' is not among those of Describe: mean"),
    (services.BrokenComponent, "components", "mean is nan"),
]


@pytest.fixture(scope="module")
def right() -> Report:
    return report_on(Right())


def test_a_right_service_passes_everything(right: Report) -> None:
    assert right.failed == []
    assert {result.name: result.detail for result in right.results if result.status is not Status.PASS} == {
        "jpeg": """error "ValueError('image/jpeg is not read')\""""
    }


@pytest.mark.parametrize(("make", "name", "words"), WRONG, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_service_fails_for_the_right_reason(make: Callable[[], Right], name: str, words: str) -> None:
    report = report_on(make())
    assert report.failed == [name], report.text()
    assert words in report.result(name).detail


def test_calls_that_were_left_hold_up_the_next() -> None:
    report = report_on(services.OneQueue(), dataclasses.replace(services.OPTIONS, allowed_s=2.0))
    assert report.failed == ["deadline", "cancellation"], report.text()
    assert "stop what nobody waits for" in report.result("deadline").detail


@pytest.mark.long
def test_how_long_they_may_is_an_option() -> None:
    """6 calls of 0.9 s, and a machine that is in no hurry."""
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
    assert {result.name for result in right.results} == covered | elsewhere


def test_the_report_reads_and_is_json(right: Report) -> None:
    assert "grey 1, pictures, scores 0 to 1, at most 8 a call, contract 1" in right.text()
    assert "1 noted, in" in right.text()
    found = json.loads(right.model_dump_json())
    assert {"name": "describe", "status": "pass"}.items() <= found["results"][2].items()
