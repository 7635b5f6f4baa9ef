"""`python`: functions of a test, in this process where that is enough, and in processes where their end matters."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from prometheus_client import CollectorRegistry

from flowfleet.job.fingerprints import CHANGED
from flowfleet.proto.reward_pb2 import MODALITY_TEXT, MODALITY_VIDEO
from flowfleet.rewards.requests import EncodedSample
from services.reward.execution.pool import ProcessPool
from services.reward.metrics import RewardMetrics
from services.reward.scorer import Outcome, Problem, Sample, Score
from services.reward.scorers import make
from services.reward.scorers.python import PythonFunction
from tests.services.reward.conftest import reward_process
from tests.services.reward.pictures import sample
from tests.services.reward.test_service import score

MODULE = """
import os, sys, time

print("imported")


def one(picture, prompt, metadata, scale="1"):
    print(prompt, "of", picture.size)
    if prompt == "raise":
        raise KeyError("nothing there")
    if prompt == "hang":
        time.sleep(1000)
    if prompt == "crash":
        os._exit(7)
    if prompt == "text":
        return "0.5"
    if prompt == "parts":
        return {"score": 1, "red": picture.getpixel((0, 0))[0], "other": 3}
    if prompt == "pid":
        return os.getpid()
    return float(scale) * len(prompt) + int(metadata.get("more", 0))


def many(pictures, prompts, metadata):
    if "raise" in prompts:
        raise KeyError("nothing there")
    scores = [len(prompt) for prompt in prompts]
    return (scores[1:] if "short" in prompts else scores), {"info": True}


def frames(frames, prompt, metadata):
    return frames.shape[0]


number = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "my_reward_functions.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("my_reward_functions", None)
    if str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


def settings(folder: Path, function: str = "one", **more: Any) -> dict[str, Any]:
    return {"function": f"my_reward_functions:{function}", "path": str(folder), **more}


def made(folder: Path, function: str = "one", **more: Any) -> PythonFunction:
    scorer = make("python", settings(folder, function, **more), 1)
    assert isinstance(scorer, PythonFunction)
    return scorer


def ask(scorer: PythonFunction, *prompts: str, **params: str) -> list[Outcome]:
    scorer.start()
    given = [Sample.of_picture(Image.new("RGB", (8, 4), "#112233"), prompt, {"more": "2"}) for prompt in prompts]
    return scorer.score(given, scorer.parse(params))


def test_one_sample_a_call(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scorer = made(folder, components=["red"], params=["scale"])
    with pytest.raises(ValueError, match=r"params\.size is unknown: this scorer takes scale"):
        scorer.parse({"size": "3"})
    assert ask(scorer, "abc", scale="10") == [Score(32.0)]
    assert ask(scorer, "parts") == [Score(1.0, {"red": 17.0})]
    assert "abc of (8, 4)" in caplog.messages
    assert "imported" in caplog.messages


def test_batches_and_pairs_of_scores_and_more(folder: Path) -> None:
    assert ask(made(folder, "many", batch=4), "a", "bcd") == [Score(1.0), Score(3.0)]
    (problem, _) = ask(made(folder, "many", batch=4), "a", "short")
    assert problem == Problem("scorer_failed", "my_reward_functions:many gave 1 scores for 2 samples")


def test_a_sample_that_a_batch_fails_on_fails_alone(folder: Path) -> None:
    problem = Problem("scorer_failed", "my_reward_functions:many raised KeyError: 'nothing there'")
    assert ask(made(folder, "many", batch=4), "a", "raise", "bcd") == [Score(1.0), problem, Score(3.0)]


def test_videos_come_as_frames(folder: Path) -> None:
    scorer = made(folder, "frames", video=True)
    assert scorer.modalities == (MODALITY_VIDEO,)
    scorer.start()
    assert scorer.score([Sample(np.zeros((5, 2, 2, 3), np.uint8), "")], ()) == [Score(5.0)]


def test_answers_come_as_text(folder: Path) -> None:
    (folder / "my_reward_functions.py").write_text(
        "def f(texts, prompts, metadata): return [len(one) for one in texts]"
    )
    scorer = made(folder, "f", text=True, batch=4)
    assert scorer.modalities == (MODALITY_TEXT,)
    scorer.start()
    assert scorer.score([Sample.of_text("four", ""), Sample.of_text("", "")], ()) == [Score(4.0), Score(0.0)]
    with pytest.raises(ValueError, match=r"settings\.text: set video or text, not both"):
        made(folder, "f", text=True, video=True)


def test_what_is_raised_or_no_number_is_said(folder: Path) -> None:
    assert ask(made(folder), "raise") == [
        Problem("scorer_failed", "my_reward_functions:one raised KeyError: 'nothing there'")
    ]
    assert ask(made(folder), "text") == [
        Problem("not_a_number", "my_reward_functions:one gave '0.5' as score, which is no number")
    ]


def test_it_describes_itself_without_importing(folder: Path) -> None:
    scorer = made(folder, name="length", score_min=0)
    assert "my_reward_functions" not in sys.modules
    assert scorer.name == "length"
    assert scorer.score_range == (0.0, float("inf"))
    assert scorer.version == f"sha256:{hashlib.sha256(MODULE.encode()).hexdigest()[:12]}"
    assert made(folder, version="7").version == "7"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"function": "no_colon"}, "settings.function: 'no_colon' is no import path: write \"module:function\""),
        ({"function": "not_there_at_all:f"}, "module not_there_at_all is not found: set settings.path"),
        ({"time_limit": 3}, "settings.time_limit: unknown setting; did you mean time_limit_s?"),
        ({"time_limit_s": 0}, "settings.time_limit_s: input should be greater than 0"),
    ],
)
def test_wrong_settings_are_named(folder: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        make("python", settings(folder) | change, 1)


def test_a_name_that_is_no_function_is_said_at_the_start(folder: Path) -> None:
    with pytest.raises(ValueError, match="my_reward_functions has no function number"):
        made(folder, "number").start()


@pytest.mark.parametrize(
    ("code", "changes", "says"),
    [
        ("def f(sample): return 1", {}, "it takes (sample), and a call gives it other arguments"),
        ("def f(sample): return 1", {}, "write def f(picture, prompt, metadata)"),
        ("def f(a, b, c): return 1", {"params": ["scale"]}, "write def f(picture, prompt, metadata, scale)"),
        ("def f(): return 1", {"batch": 4, "video": True}, "write def f(frames, prompts, metadata)"),
    ],
)
def test_a_function_of_other_arguments_is_refused_at_the_start(
    folder: Path, code: str, changes: dict[str, Any], says: str
) -> None:
    (folder / "my_reward_functions.py").write_text(code)
    with pytest.raises(ValueError, match=re.escape(says)):
        made(folder, "f", **changes).start()


@pytest.mark.parametrize(
    "code", ["def f(*all, **more): return 1", "f = max", "def f(p, q, m, scale='1', more=2): return 1"]
)
def test_a_function_that_takes_what_it_gets_starts(folder: Path, code: str) -> None:
    (folder / "my_reward_functions.py").write_text(code)
    made(folder, "f", params=["scale"]).start()


def test_an_object_loads_what_it_needs_at_the_start(folder: Path) -> None:
    (folder / "my_reward_functions.py").write_text(
        "class Counted:\n"
        "    def start(self): self.known = 3\n"
        "    def __call__(self, picture, prompt, metadata): return self.known\n"
        "f = Counted()\n"
    )
    assert ask(made(folder, "f"), "a") == [Score(3.0)]


def test_hangs_and_crashes_cost_their_own_sample(folder: Path) -> None:
    given = settings(folder, time_limit_s=4.0)
    scorer = make("python", given, 1)
    assert isinstance(scorer, PythonFunction)
    metrics = RewardMetrics("python", (0.0, 1.0), CollectorRegistry())
    pool = ProcessPool(partial(make, "python", given, 1), 1, metrics, limits=scorer.process_limits)
    try:
        prompts = ["abc", "hang", "crash", "raise", "pid"]
        outcomes = pool([EncodedSample.of(sample(prompt, Image.new("RGB", (8, 4)), prompt)) for prompt in prompts], ())
    finally:
        pool.close()
    assert outcomes[0] == Score(3.0)
    assert messages(outcomes[1:4]) == [
        "the process that scored this sample died twice, the second time with signal SIGKILL after 4 s without an "
        "answer: raise settings.time_limit_s if that is too little",
        "the process that scored this sample died twice, the second time with exit code 7",
        "my_reward_functions:one raised KeyError: 'nothing there'",
    ]
    assert isinstance(outcomes[4], Score)
    assert outcomes[4].value != os.getpid()


def test_a_process_that_replaces_another_does_not_score_by_an_edited_file(folder: Path) -> None:
    scorer = made(folder)
    metrics = RewardMetrics("python", (0.0, 1.0), CollectorRegistry())
    assert scorer.pinned is not None
    pool = ProcessPool(partial(make, "python", scorer.pinned, 1), 1, metrics, limits=scorer.process_limits)
    crashing, sound = (EncodedSample.of(sample(text, Image.new("RGB", (8, 4)), text)) for text in ("crash", "abc"))
    try:
        (folder / "my_reward_functions.py").write_text(MODULE.replace("len(prompt)", "2 * len(prompt)"))
        before = pool([sound], ())
        after = [*pool([crashing], ()), *pool([sound], ())]
        (folder / "my_reward_functions.py").write_text(MODULE)
        again = pool([sound], ())
    finally:
        pool.close()
    assert before == again == [Score(3.0)]
    assert messages(after) == [f"the file of my_reward_functions:one {CHANGED}"] * 2


def messages(outcomes: Sequence[Outcome]) -> list[str]:
    return [outcome.message for outcome in outcomes if isinstance(outcome, Problem)]


async def test_as_a_service_it_has_a_process_of_its_own_and_logs_what_is_printed(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "python.toml"
    file.write_text(f'function = "my_reward_functions:one"\npath = "{folder}"\nname = "changed"\n')
    flags = ("--scorer", "python", "--settings", str(file), "--set", "name=length")
    with reward_process(tmp_path, *flags) as service:
        given = await score(
            service, [sample("a", Image.new("RGB", (8, 4)), "pid"), sample("b", Image.new("L", (8, 4)), "b")]
        )
        assert given["b"].score == 1.0
        assert given["a"].score != service.process.pid
        assert service.metric("flowfleet_reward_processes", scorer="length") == 1
        assert "pid of (8, 4)" in service.log.read_text()


@pytest.mark.parametrize("given", ['(0.5, {"red": 1, "other": 2})', '{"score": 0.5, "red": 1}'])
@pytest.mark.parametrize("batch", [1, 8])
def test_both_conventions_of_a_score_with_components(folder: Path, given: str, batch: int) -> None:
    body = f"[{given}] * len(prompt)" if batch > 1 else given
    (folder / "my_reward_functions.py").write_text(f"def one(media, prompt, metadata):\n    return {body}\n")
    assert ask(made(folder, batch=batch, components=["red"]), "a", "b") == [Score(0.5, {"red": 1.0})] * 2
