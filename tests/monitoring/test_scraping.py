"""The parts of tests/cluster/prometheus.py that need no cluster, against a real Prometheus."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, Gauge

from flowfleet.process.telemetry import start_metrics_server
from tests.cluster import discovery, prometheus
from tests.cluster.pictures import draw
from tests.cluster.prometheus import Server, static_jobs
from tests.monitoring.boards import BOARDS, Query
from tests.monitoring.test_agreement import RULES

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus: install it")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Scrapes one process that says that Redis is down."""
    registry = CollectorRegistry()
    Gauge("flowfleet_redis_up", "", registry=registry).set(0)
    Gauge("flowfleet_job_step", "", ["job"], registry=registry).labels(job="a").set(3)
    means = Gauge("flowfleet_critic_reward_score_mean", "", ["job", "reward"], registry=registry)
    for number, name in enumerate(("ocr", "image_quality")):
        means.labels(job="a", reward=name).set(number)
    port = start_metrics_server("127.0.0.1", 0, registry)
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8").replace("@namespace", 'namespace="here"'))
    with Server(static_jobs({"controller": f"127.0.0.1:{port}"}, "here"), "here", rules) as made:
        made.wait_for("flowfleet_redis_up")
        time.sleep(prometheus.SCRAPE_S)  # ranges have a point each so many seconds
        yield made


def test_labels_of_ours_stay_as_they_are(server: Server) -> None:
    (found,) = server.query("flowfleet_job_step")
    assert found["metric"]["job"] == "a"
    assert (found["metric"]["namespace"], found["metric"]["pod"]) == ("here", "controller")
    assert [target["health"] for target in server.targets()] == ["up"]


def test_variables_of_boards_are_filled_in(server: Server) -> None:
    (found,) = server.series(Query('max by (job) (flowfleet_job_step{namespace="$namespace", job=~"$job"})'))
    assert {value for _, value in found["values"]} == {"3"}


def test_each_reward_has_a_series(server: Server) -> None:
    panels = [panel for board in BOARDS for panel in board.panels if panel.row == "Each reward of a job, raw"]
    (panel,) = [panel for panel in panels if panel.title == "Mean score"]
    found = {series["metric"]["reward"]: series["values"][-1][1] for series in server.series(panel.queries[0])}
    assert found == {"ocr": "0", "image_quality": "1"}


def test_panels_that_the_demo_leaves_empty_exist() -> None:
    titles = {panel.title for board in BOARDS for panel in board.panels}
    assert set(prometheus.EMPTY_IN_THE_DEMO) <= titles
    assert prometheus.EMPTY_WITHOUT_JUDGES


def test_the_rules_are_taken_and_evaluated(server: Server) -> None:
    server.check_rules()
    server.wait_for('ALERTS{alertname="FlowfleetRedisDown"}')
    assert "FlowfleetRedisDown" in server.firing()


def test_a_wrong_query_is_an_error(server: Server) -> None:
    with pytest.raises(AssertionError, match="parse error"):
        server.query("sum(")


def test_panels_without_data_are_named(server: Server) -> None:
    with pytest.raises(AssertionError, match=r"panels without data: .*Training / Reward of the last step"):
        server.check_boards()


def test_a_board_without_data_is_drawn_too(server: Server, tmp_path: Path) -> None:
    (rewards,) = [board for board in BOARDS if board.name == "rewards"]
    assert draw(server, rewards, tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")


def test_monitors_choose_among_what_is_discovered() -> None:
    monitor = {
        "metadata": {"name": "m"},
        "spec": {
            "selector": {
                "matchLabels": {"app.kubernetes.io/name": "flowfleet"},
                "matchExpressions": [{"key": "part", "operator": "In", "values": ["a", "b"]}],
            },
            "namespaceSelector": {"matchNames": ["ns"]},
            "endpoints": [
                {
                    "port": "metrics",
                    "path": "/metrics",
                    "honorLabels": True,
                    "relabelings": [{"sourceLabels": ["x"], "regex": "(.+)", "targetLabel": "pool"}],
                }
            ],
        },
    }
    found = prometheus.service_job(monitor)
    kept = {
        rule["source_labels"][0]: rule["regex"] for rule in found["relabel_configs"] if rule.get("action") == "keep"
    }
    assert kept == {
        "__meta_kubernetes_namespace": "ns",
        "__meta_kubernetes_service_label_app_kubernetes_io_name": "flowfleet",
        "__meta_kubernetes_service_label_part": "a|b",
        "__meta_kubernetes_endpointslice_port_name": "metrics",
    }
    assert found["relabel_configs"][-1] == {"source_labels": ["x"], "regex": "(.+)", "target_label": "pool"}
    assert found["honor_labels"] is True


def test_what_is_discovered_has_the_labels_of_service_and_pod() -> None:
    pod = {
        "kind": "Pod",
        "metadata": {"name": "p-0", "namespace": "ns", "labels": {"flowfleet.io/pool": "wide"}},
        "spec": {"containers": [{"ports": [{"name": "metrics", "containerPort": 9470}]}]},
        "status": {"phase": "Running", "podIP": "10.0.0.1"},
    }
    service = {"kind": "Service", "metadata": {"name": "s", "labels": {"app.kubernetes.io/component": "rollout"}}}
    piece = {
        "kind": "EndpointSlice",
        "metadata": {"name": "s-x", "labels": {"kubernetes.io/service-name": "s"}},
        "endpoints": [{"addresses": ["10.0.0.1"], "targetRef": {"kind": "Pod", "name": "p-0"}}],
        "ports": [{"name": "metrics", "port": 9470}],
    }
    of_pod = {
        "__meta_kubernetes_namespace": "ns",
        "__meta_kubernetes_pod_name": "p-0",
        "__meta_kubernetes_pod_phase": "Running",
        "__meta_kubernetes_pod_label_flowfleet_io_pool": "wide",
    }
    (by_service,) = discovery.endpointslice_targets([pod, service, piece])
    assert by_service["targets"] == ["10.0.0.1:9470"]
    assert by_service["labels"] == {
        **of_pod,
        "__meta_kubernetes_endpointslice_port_name": "metrics",
        "__meta_kubernetes_service_label_app_kubernetes_io_component": "rollout",
    }
    (by_pod,) = discovery.pod_targets([pod, service, piece])
    assert by_pod["labels"] == {**of_pod, "__meta_kubernetes_pod_container_port_name": "metrics"}
