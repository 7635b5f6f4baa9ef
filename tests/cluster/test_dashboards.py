"""What Prometheus finds in a cluster by the chart's monitors, and that it takes its rules. Boards with a job's data are
looked at in test_demo.py."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cluster.conftest import CHART, Cluster
from tests.cluster.prometheus import Prometheus
from tests.cluster.release import PREFIX, TAG, storage

RELEASE = "watched"

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_prometheus_scrapes_every_pod_that_has_metrics_and_takes_the_rules(cluster: Cluster) -> None:
    with storage(cluster) as volumes:
        settings = [
            *("--values", str(CHART / "values-cpu.yaml"), *volumes),
            *("--set", f"images.registry={PREFIX.rstrip('/')},images.tag={TAG}"),
            *("--set", f"images.redis={PREFIX}flowfleet-redis:{TAG}"),
            *("--set", "controller.replicas=2,rollout.replicas=1"),
        ]
        cluster.helm("install", RELEASE, str(CHART), *settings, "--wait", "--timeout", "5m", timeout_s=330)
        with Prometheus(cluster, RELEASE) as prometheus:
            prometheus.wait_for("max(flowfleet_controller_leader) == 1")
            prometheus.wait_for("count(flowfleet_reward_queued_samples) == 1")
            prometheus.wait_for("count(flowfleet_rollout_in_flight) == 1")
            prometheus.wait_for("flowfleet_redis_up == 1")
            scraped = Counter(target["labels"]["pod"] for target in prometheus.targets())
            assert all(target["health"] == "up" for target in prometheus.targets())
            components = ("controller", "rollout", "reward")
            selector = f"app.kubernetes.io/component in ({','.join(components)})"
            pods = [pod["metadata"]["name"] for pod in cluster.get("pods", "--selector", selector)]
            assert scraped == Counter(pods), "each pod once"
            assert len(pods) == 4
            assert prometheus.query('flowfleet_rollout_in_flight{pool="default"}'), "the pod's pool is a label"
            prometheus.check_rules()
            assert prometheus.firing() <= {"FlowfleetPoolEmpty"}
        cluster.helm("uninstall", RELEASE, "--wait")
