"""Boards, rules, documentation and code agree: what is charted or alerted on is exported, and what is exported is
documented."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from flowfleet.data.blob_metrics import BlobMetrics
from flowfleet.process.telemetry import metric_name
from services.controller.job.shadow_queue import ShadowMetrics
from services.controller.metrics.families import DESCRIPTIONS
from services.controller.rewards.metrics import RewardCalls
from services.controller.rewards.rows import reward_row
from services.reward.judge.metrics import JudgeMetrics
from services.reward.metrics import RewardMetrics
from services.rollout.metrics import RolloutMetrics
from tests.monitoring.boards import BOARDS, Board, Panel
from tests.monitoring.promql import filled, metrics, patterns

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "helm" / "flowfleet" / "files" / "alerts.yaml"
DOCS = ROOT / "docs" / "metrics.md"
OF_CONTROLLER = {
    "flowfleet_controller_jobs",
    "flowfleet_controller_leader",
    "flowfleet_redis_lost_writes",
    "flowfleet_redis_unacknowledged_seconds",
    "flowfleet_controller_archive_failures_total",
    "flowfleet_controller_retention_held",
    "flowfleet_state_bytes",
    "flowfleet_unschedulable_pods",
    "flowfleet_kubernetes_stale_seconds",
}
STEP_NAME = re.compile(r'"((?:actor|critic|rollout_corr|training|perf|timing_s|timing_per_image_ms|val)/[a-z0-9_/]+)"')
OF_A_REWARD = [metric_name(name) for name in reward_row("critic", ["ocr"], [])]
"""Names that hold the name of a reward."""
CHOICE = {"namespace": "ns", "job": ".*", "pool": ".*"}
PANELS = [pytest.param(board, panel, id=f"{board.name}: {panel.title}") for board in BOARDS for panel in board.panels]


def sources() -> Iterator[str]:
    for folder in ("flowfleet", "services"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.read_text(encoding="utf-8")


def step_metrics() -> set[str]:
    """Names in the code of what is measured a step."""
    found: set[str] = set()
    for text in sources():
        found |= set(STEP_NAME.findall(text))
        found |= {f"timing_s/{name}" for name in re.findall(r'timings\("(\w+)"\)', text)}
    return found


def service_metrics() -> set[str]:
    """Metrics that services export; a histogram by its own name."""
    registry = CollectorRegistry()
    RolloutMetrics(registry)
    RewardMetrics("ocr", (0.0, 1.0), registry)
    JudgeMetrics(registry)
    RewardCalls(registry)
    ShadowMetrics(registry)
    BlobMetrics(registry)
    text = "".join(sources())
    assert all(f'"{name}"' in text for name in OF_CONTROLLER)
    return {_exposed(family) for family in registry.collect()} | reward_metrics() | set(DESCRIPTIONS) | OF_CONTROLLER


def reward_metrics() -> set[str]:
    """Metrics of each reward of a job."""
    rows = [reward_row(prefix, ["ocr"], []) for prefix in ("critic", "val-core")]
    return {metric_name(name) for row in rows for name in row}


def _exposed(family: Any) -> str:
    return f"{family.name}_total" if family.type == "counter" else str(family.name)


def documented() -> tuple[set[str], set[str]]:
    """Documented metrics of steps and of services. `a/b/mean`, `max` in one cell is a/b/mean and a/b/max."""
    steps, services = set(), set()
    for cell in re.findall(r"^\| (`.*?) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE):
        names = re.findall(r"`([^`]+)`", cell)
        if names[0].startswith("flowfleet_"):
            services |= set(names)
        else:
            prefix = names[0].rpartition("/")[0]
            steps |= {name if "/" in name else f"{prefix}/{name}" for name in names}
    return steps, services


def alerts() -> list[dict[str, Any]]:
    text = RULES.read_text(encoding="utf-8").replace("@namespace", 'namespace="ns"')
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def family(name: str) -> str:
    """Histogram's name for one of its series."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


def test_every_step_metric_is_documented_and_nothing_else() -> None:
    assert documented()[0] == step_metrics()


def test_every_service_metric_is_documented_and_nothing_else() -> None:
    assert documented()[1] == service_metrics()


@pytest.mark.parametrize(("board", "panel"), PANELS)
def test_a_panel_reads_only_what_is_exported_and_says_what_it_shows(board: Board, panel: Panel) -> None:
    exported = service_metrics() | {metric_name(name) for name in step_metrics()}
    for query in panel.queries:
        expression = filled(query.expression, CHOICE)
        read, chosen = metrics(expression), patterns(expression)
        assert read or chosen
        assert {family(name) for name in read} <= exported
        for pattern in chosen:
            assert any(found and found[1] == "ocr" for found in (re.fullmatch(pattern, name) for name in OF_A_REWARD))
    assert panel.description.endswith(".")
    assert panel.unit


def test_every_alert_reads_only_what_is_exported_and_says_what_to_do() -> None:
    exported = service_metrics() | {metric_name(name) for name in step_metrics()}
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    for rule in alerts():
        read = metrics(rule["expr"])
        assert read, rule["alert"]
        assert {family(name) for name in read} <= exported, rule["alert"]
        assert rule["expr"].count("namespace=") >= len(read), rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_a_board_is_laid_out_without_overlaps(board: Board) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board.json["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_a_board_has_the_variables_that_its_queries_use(board: Board) -> None:
    written = board.json
    names = {variable["name"] for variable in written["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(written["panels"])))
    assert {name for name in used if not name.startswith("__") and not name.isdigit()} <= names
    identifiers = [panel["id"] for panel in written["panels"]]
    assert len(set(identifiers)) == len(identifiers)


def test_metrics_of_an_expression() -> None:
    text = (
        'histogram_quantile(0.9, sum by (le) (rate(a_bucket{x="y"}[5m]))) / -(b > 0) or on (j) max_over_time(c[1h:1m])'
    )
    assert metrics(text) == {"a_bucket", "b", "c"}
    chosen = '{__name__=~"a_(.+)_b", __name__!~"a_c_b"}'
    assert (metrics(chosen), patterns(chosen)) == (set(), {"a_(.+)_b"})
    with pytest.raises(ValueError, match="parenthesis"):
        metrics("sum(")
