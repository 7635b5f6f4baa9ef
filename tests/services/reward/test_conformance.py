"""The scorers that need no model of their own keep the contract, each as a real process."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowfleet import conformance
from tests.services.reward.conftest import reward_process


@pytest.mark.long
@pytest.mark.parametrize("name", ["ocr", "jpeg_compressibility", "jpeg_incompressibility", "motion", "image_quality"])
def test_a_scorer_keeps_the_contract(name: str, tmp_path: Path) -> None:
    with reward_process(tmp_path, "--scorer", name, "--processes", "1", "--threads", "1") as service:
        report = conformance.run(f"grpc://{service.address}", conformance.Options(timeout_s=120.0))
    assert report.failed == [], report.text()
    assert [result.name for result in report.results if result.status is conformance.Status.NOTE] == [], report.text()
