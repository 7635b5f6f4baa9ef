"""The scorers that need no model of torch, as services before the conformance suite."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.reward_asking import slow_server
from flowfleet import conformance
from tests.services.reward.conftest import reward_process

PROMPT = 'a sign that says "OPEN" moves to the right'
PYTHON = {"function": "bench.reward:redness", "path": str(Path(__file__).parents[3])}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("image_quality", {}, id="image_quality"),
        *(
            pytest.param(name, settings, id=name, marks=pytest.mark.long)
            for name, settings in {
                "jpeg_compressibility": {},
                "motion": {},
                "ocr": {},
                "python": PYTHON,
                "http": {"batch_size": 1},
            }.items()
        ),
    ],
)
def test_they_keep_the_contract(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    with ExitStack() as stack:
        if name == "http":
            settings = settings | {"url": stack.enter_context(slow_server(0.01))}
        file = tmp_path / "settings.json"
        file.write_text(json.dumps(settings))
        flags = ("--scorer", name, "--settings", str(file), "--threads", "1")
        service = stack.enter_context(reward_process(tmp_path, *flags))
        report = conformance.run(f"grpc://{service.address}", conformance.Options(prompt=PROMPT))
    assert report.ok, report.text()
