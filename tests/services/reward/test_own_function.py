"""`python` with `gradient = true`: gradients of functions of a test, what these may not give, and their process."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from flowfleet import conformance
from flowfleet.extras import pip_install
from flowfleet.proto.reward_pb2 import DescribeRequest, ScoreRequest, ScoreWithGradientRequest
from flowfleet.proto.reward_pb2_grpc import RewardServiceStub
from flowfleet.rewards.gradients import PixelInput, read_gradient
from services.reward.execution.engines import evaluate_gradients
from services.reward.execution.evaluator import Evaluator
from services.reward.scorer import Problem, Sample, Score, ScoreGradient
from services.reward.scorers import make
from services.reward.scorers.python.gradient import DifferentiableFunction
from tests.services.reward.conftest import reward_process
from tests.services.reward.pictures import sample

MODULE = """
import os, torch


def power(pictures, prompts, metadata, exponent="2"):
    print(tuple(pictures.shape))
    if "raise" in prompts:
        raise KeyError("nothing there")
    scores = (pictures ** int(exponent)).mean(dim=(1, 2, 3))
    return {"score": scores, "red": pictures[:, 0].mean(dim=(1, 2)), "other": "unread"}


def pid(pictures, prompts, metadata):
    return pictures.mean(dim=(1, 2, 3)) * 0 + os.getpid()


def root(pictures, prompts, metadata):
    return pictures.sum(dim=(1, 2, 3)).sqrt()


def log(pictures, prompts, metadata):
    return pictures.sum(dim=(1, 2, 3)).log()


def blind(pictures, prompts, metadata):
    return torch.ones(len(pictures))


def cut(pictures, prompts, metadata):
    return pictures.detach().mean(dim=(1, 2, 3))


def elsewhere(pictures, prompts, metadata):
    return torch.ones(len(pictures), requires_grad=True) * 2


def one(pictures, prompts, metadata):
    return pictures.mean()


def numbers(pictures, prompts, metadata):
    return [0.5 for prompt in prompts]


def unnamed(pictures, prompts, metadata):
    return {"value": pictures.mean(dim=(1, 2, 3))}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "my_gradients.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("my_gradients", None)
    if str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


def settings(folder: Path, function: str, **more: Any) -> dict[str, Any]:
    return {"function": f"my_gradients:{function}", "path": str(folder), "gradient": True, **more}


def made(folder: Path, function: str = "power", **more: Any) -> DifferentiableFunction:
    scorer = make("python", settings(folder, function, **more), 1)
    assert isinstance(scorer, DifferentiableFunction)
    scorer.start()
    return scorer


def inputs(*shapes: tuple[int, int], prompt: str = "a") -> list[PixelInput]:
    random = np.random.default_rng(0)
    return [PixelInput(random.random((3, *shape), np.float32), prompt) for shape in shapes]


def problem(scorer: DifferentiableFunction, pixels: PixelInput) -> str:
    (outcome,) = evaluate_gradients(Evaluator(scorer, 0), [pixels], ())
    assert isinstance(outcome, Problem)
    return outcome.message


def test_gradients_are_those_of_the_formula_whatever_the_sizes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The gradient of mean(x ** n) is n x ** (n - 1) / N."""
    caplog.set_level("INFO")
    scorer = made(folder, batch=2, params=["exponent"], components=["red"])
    given = inputs((4, 6), (8, 8), (4, 6), (4, 6))
    found = scorer.score_with_gradient(given, scorer.parse({"exponent": "3"}))
    for one, outcome in zip(given, found, strict=True):
        assert isinstance(outcome, ScoreGradient)
        assert outcome.value == pytest.approx(float((one.pixels.astype(np.float64) ** 3).mean()), rel=1e-5)
        assert outcome.gradient == pytest.approx(3 * one.pixels**2 / one.pixels.size, rel=1e-5)
        assert outcome.components == {"red": pytest.approx(float(one.pixels[0].mean()), rel=1e-5)}
    shapes = [line for line in caplog.messages if line.startswith("(")]
    assert shapes == ["(2, 3, 4, 6)", "(1, 3, 4, 6)", "(1, 3, 8, 8)"]


def test_plain_scores_are_of_the_same_function(folder: Path) -> None:
    scorer = made(folder, batch=8, components=["red"])
    frames = [np.full((1, 4, 6, 3), level, np.uint8) for level in (51, 102)]
    frames.append(np.full((1, 2, 2, 3), 255, np.uint8))
    for level, outcome in zip((0.2, 0.4, 1.0), scorer.score([Sample(one, "a") for one in frames], ()), strict=True):
        assert isinstance(outcome, Score)
        assert (outcome.value, outcome.components["red"]) == (pytest.approx(level**2), pytest.approx(level))


def test_a_sample_that_a_batch_fails_on_fails_alone(folder: Path) -> None:
    scorer = made(folder, batch=4)
    good, bad = inputs((4, 4)), inputs((4, 4), prompt="raise")
    first, second = scorer.score_with_gradient([*good, *bad], ())
    assert isinstance(first, ScoreGradient)
    assert second == Problem("scorer_failed", "my_gradients:power raised KeyError: 'nothing there'")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("blind", "gave scores that do not depend on the pixels: compute them from the pictures by torch alone"),
        ("cut", "gave scores that do not depend on the pixels"),
        ("elsewhere", "gave scores that do not depend on the pixels"),
        ("one", "gave a tensor of shape () as score: give a tensor of shape (1,), one a picture"),
        ("numbers", "gave list as score: give a tensor of shape (1,)"),
        ("unnamed", "gave a mapping of value: name the scores `score`"),
    ],
)
def test_results_without_a_gradient_say_what_to_change(folder: Path, function: str, says: str) -> None:
    (pixels,) = inputs((4, 4))
    assert problem(made(folder, function), pixels).startswith(f"my_gradients:{function} {says}")


def test_what_is_not_finite_is_said(folder: Path) -> None:
    """At 0 a root has an infinite slope, and a logarithm is itself infinite."""
    black = PixelInput(np.zeros((3, 4, 4), np.float32), "a")
    assert problem(made(folder, "root"), black).startswith("the gradient has NaN or infinite elements")
    assert problem(made(folder, "log"), black) == "the score is -inf"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"video": True}, "settings.gradient: only pictures have gradients: leave out gradient, or settings.video"),
        ({"text": True}, "settings.gradient: only pictures have gradients: leave out gradient, or settings.text"),
        ({"time_limit_s": 9.0}, "settings.time_limit_s ends a process of the function's own"),
    ],
)
def test_settings_that_have_no_gradient_are_refused(folder: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        make("python", settings(folder, "power", **change), 1)


def test_a_function_of_other_arguments_is_refused_at_the_start(folder: Path) -> None:
    (folder / "my_gradients.py").write_text("def f(picture): return 1")
    with pytest.raises(ValueError, match=re.escape("write def f(pictures, prompts, metadata)")):
        made(folder, "f")


def test_without_torch_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.reward.scorers.python.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape(pip_install("reward-models"))):
        make("python", settings(folder, "power"), 1)


def test_a_service_scores_in_its_own_process_with_and_without_gradient(folder: Path, tmp_path: Path) -> None:
    flags = ("--scorer", "python", "--set", "function=my_gradients:pid", "--set", f"path={folder}")
    (pixels,) = inputs((4, 6))
    with (
        reward_process(tmp_path, *flags, "--set", "gradient=true") as service,
        grpc.insecure_channel(service.address) as channel,
    ):
        stub: Any = RewardServiceStub(channel)
        described = stub.Describe(DescribeRequest(), timeout=30)
        assert (described.gives_gradient, described.contract) == (True, 2)
        request = ScoreWithGradientRequest(samples=[replace(pixels, sample_id="1").message()])
        (scored,) = stub.ScoreWithGradient(request, timeout=30).scores
        assert scored.score == service.process.pid
        assert not read_gradient(scored.gradient, (3, 4, 6)).any()
        (plain,) = stub.Score(ScoreRequest(samples=[sample("1", Image.new("RGB", (8, 4)), "")]), timeout=30).scores
        assert plain.score == service.process.pid


@pytest.mark.long
def test_a_service_of_it_keeps_the_contract(folder: Path, tmp_path: Path) -> None:
    flags = ("--scorer", "python", "--set", "function=my_gradients:power", "--set", f"path={folder}")
    options = conformance.Options(timeout_s=120.0, connect_s=60.0, allowed_s=30.0)
    with reward_process(tmp_path, *flags, "--set", "gradient=true", "--set", "batch=8", "--threads", "1") as service:
        report = conformance.run(f"grpc://{service.address}", options)
    assert report.failed == [], report.text()
    assert report.result("gradient score").status is conformance.Status.PASS, report.text()
