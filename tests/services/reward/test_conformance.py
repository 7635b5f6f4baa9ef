"""The scorers that need no model of torch keep the contract, each as a real process; those that ask others, before a
server that gives every picture the same answer."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowfleet import conformance
from tests.services.reward.conftest import reward_process
from tests.services.reward.slow_server import slow_server

OPTIONS = conformance.Options(timeout_s=120.0, connect_s=60.0, allowed_s=30.0)
ASKING = {
    "http": {"url": "http://127.0.0.1:{port}/", "batch_size": 1},
    "vlm": {"urls": "http://127.0.0.1:{port}/v1", "model": "judge", "rubric": "alignment"},
    "vlm_ocr": {"urls": "http://127.0.0.1:{port}/v1", "model": "judge"},
}
PYTHON = {"function": "tests.services.reward.redness:redness", "path": str(Path(__file__).parents[3])}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("image_quality", {}),
        ("diversity", {}),
        ("jpeg_compressibility", {}),
        ("jpeg_incompressibility", {}),
        ("motion", {}),
        ("loudness", {}),
        ("ocr", {}),
        ("python", PYTHON),
        *ASKING.items(),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_scorer_keeps_the_contract(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    with ExitStack() as stack:
        if name in ASKING:
            port = stack.enter_context(slow_server(0.01, in_flight=64))
            address = next(key for key in ("url", "urls") if key in settings)
            settings = settings | {address: settings[address].format(port=port)}
        file = tmp_path / "settings.json"
        file.write_text(json.dumps(settings))
        flags = ("--scorer", name, "--settings", str(file), "--threads", "1")
        service = stack.enter_context(reward_process(tmp_path, *flags))
        report = conformance.run(f"grpc://{service.address}", replace(OPTIONS, metadata={"loudness": "-20"}))
    assert report.failed == [], report.text()
    noted = [result.name for result in report.results if result.status is conformance.Status.NOTE]
    blind = ["order and company", "truncated media", "large call in order", "media size"]
    softened = ["gradient score"] if name == "image_quality" else []  # of few colors, as the suite's pictures have
    assert noted == (blind if name in ASKING else softened), report.text()


@pytest.mark.long
def test_the_reward_of_people_keeps_the_contract_while_all_scores_are_pending(tmp_path: Path) -> None:
    with reward_process(tmp_path, "--scorer", "human", "--set", "url=http://127.0.0.1:1") as service:
        report = conformance.run(f"grpc://{service.address}", OPTIONS)
    assert report.failed == [], report.text()
    assert report.result("pending").status is conformance.Status.PASS
    assert report.result("broken media").status is conformance.Status.PASS


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "answer", "params"),
    [("exact_match", "a", {"after": "answer is"}), ("multiple_choice", "A", {}), ("math", "7", {})],
)
def test_a_scorer_of_answers_keeps_the_contract(name: str, answer: str, params: dict[str, str], tmp_path: Path) -> None:
    if name == "math":
        pytest.importorskip("math_verify")
    numbers = [tmp_path / f"{number}.txt" for number in (7, 8)]
    for file in numbers:
        file.write_text(f"The sum is \\boxed{{{file.stem}}}")
    options = replace(OPTIONS, metadata={"answer": answer}, params=params, images=numbers if name == "math" else ())
    with reward_process(tmp_path, "--scorer", name, "--threads", "1") as service:
        report = conformance.run(f"grpc://{service.address}", options)
    assert report.failed == [], report.text()
    noted = [result.name for result in report.results if result.status is conformance.Status.NOTE]
    assert noted == [], report.text()
    assert report.service is not None
    assert report.service.modalities == ["texts"]
