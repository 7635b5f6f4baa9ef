"""The scorers that need no model of torch keep the contract, each as a real process."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.judge import slow_server
from flowfleet import conformance
from tests.services.reward.conftest import reward_process

OPTIONS = conformance.Options(timeout_s=120.0, connect_s=60.0, allowed_s=30.0)
PYTHON = {"function": "bench.reward:redness", "path": str(Path(__file__).parents[3])}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("image_quality", {}),
        ("jpeg_compressibility", {}),
        ("jpeg_incompressibility", {}),
        ("motion", {}),
        ("ocr", {}),
        ("python", PYTHON),
        ("http", {"batch_size": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_scorer_keeps_the_contract(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    with ExitStack() as stack:
        if name == "http":
            _, port = stack.enter_context(slow_server(0.01, in_flight=64))
            settings = settings | {"url": f"http://127.0.0.1:{port}/"}
        file = tmp_path / "settings.json"
        file.write_text(json.dumps(settings))
        flags = ("--scorer", name, "--settings", str(file), "--threads", "1")
        service = stack.enter_context(reward_process(tmp_path, *flags))
        report = conformance.run(f"grpc://{service.address}", OPTIONS)
    assert report.failed == [], report.text()
    noted = [result.name for result in report.results if result.status is conformance.Status.NOTE]
    blind = ["order and company", "truncated media"]  # that server gives every picture the same score
    assert noted == (blind if name == "http" else []), report.text()
