"""When alerts fire, told by Prometheus's own test tool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.test_agreement import RULES, alerts

CASES = Path(__file__).parent / "alerts_test.yaml"


def cases() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    return found


def test_each_alert_fires_in_some_case() -> None:
    fired = {case["alertname"] for group in cases()["tests"] for case in group["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in alerts()}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: install Debian's prometheus")
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """Annotations are left out: promtool would compare them filled in."""
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8").replace("@namespace", 'namespace="ns"'))
    for group in rules["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
    shutil.copy(CASES, tmp_path / "tests.yaml")
    done = subprocess.run(("promtool", "test", "rules", "tests.yaml"), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: install Debian's prometheus")
def test_the_rules_are_well_formed_with_their_annotations(tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text(RULES.read_text(encoding="utf-8").replace("@namespace", 'namespace="ns"'))
    done = subprocess.run(("promtool", "check", "rules", "alerts.yaml"), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
