"""A Prometheus on this host that scrapes a release, and what one may ask of it: boards, rules, pictures.

    with Prometheus(cluster, "flowfleet") as prometheus:
        ...                                   # a job runs
        prometheus.check_boards()             # every query runs, no panel is empty
        prometheus.check_rules()
        prometheus.render(directory)          # one PNG a board

What it scrapes is read from the release's ServiceMonitor and PodMonitor, whose selectors, ports and relabelings become
Prometheus's own, over what discovery.py finds in the cluster; pods must be reachable from this host. `Server` is the
part that knows no cluster.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from tests.cluster.conftest import CHART, Cluster
from tests.cluster.discovery import Discovery, sanitized
from tests.monitoring.boards import BOARDS, Query
from tests.monitoring.promql import filled

SCRAPE_S = 2
RATE = "30s"
"""Rate of the boards: jobs of tests are short."""
START_TIMEOUT_S = 30.0
EMPTY_ON_CPUS = ("Model FLOPs utilization of the trainer",)
"""Titles of the panels that have no data where there is no accelerator, whose peak is known."""
EMPTY_WITHOUT_JUDGES = tuple(panel.title for board in BOARDS for panel in board.panels if panel.row == "Judges")
"""Likewise of fleets without a judge."""
EMPTY_IN_THE_DEMO = (*EMPTY_ON_CPUS, *EMPTY_WITHOUT_JUDGES)

Series = dict[str, Any]


class Server:
    """Prometheus with the scrape configurations of `jobs`. `namespace` is what the boards' variable chooses."""

    def __init__(
        self, jobs: Sequence[Mapping[str, Any]], namespace: str, rules: Mapping[str, Any] | None = None
    ) -> None:
        self._jobs, self._rules = jobs, rules
        self.namespace = namespace
        self._directory = Path(tempfile.mkdtemp(prefix="prometheus-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.started = 0.0

    def __enter__(self) -> Self:
        binary = shutil.which("prometheus")
        assert binary is not None, "no prometheus on PATH: install Debian's package"
        intervals = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
        config = {"global": intervals, "scrape_configs": list(self._jobs)}
        if self._rules is not None:
            (self._directory / "rules.yml").write_text(yaml.safe_dump(dict(self._rules)))
            config |= {"rule_files": ["rules.yml"]}
        (self._directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = _free_port()
        command = [binary, "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"]
        command.append(f"--web.listen-address=127.0.0.1:{port}")
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(command, cwd=self._directory, stdout=log, stderr=log)
        self.url = f"http://127.0.0.1:{port}"
        self.started = time.time()
        self._wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
        shutil.rmtree(self._directory)

    # -- asking ------------------------------------------------------------------------------------------------

    def query(self, expression: str) -> list[Series]:
        """The instant vector. Raises AssertionError with Prometheus's own words."""
        return self._get("query", query=expression)

    def query_range(self, expression: str, step_s: float = SCRAPE_S) -> list[Series]:
        """Since the start."""
        return self._get("query_range", query=expression, start=self.started, end=time.time(), step=step_s)

    def targets(self) -> list[dict[str, Any]]:
        """Active targets."""
        with urllib.request.urlopen(f"{self.url}/api/v1/targets?state=active", timeout=10) as reply:
            found: list[dict[str, Any]] = json.load(reply)["data"]["activeTargets"]
            return found

    def wait_for(self, expression: str, timeout_s: float = 60.0) -> list[Series]:
        """The first answer that is not empty."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.query(expression)):
            assert time.monotonic() < deadline, f"nothing within {timeout_s:.0f} s: {expression}\n{self.log}"
            time.sleep(SCRAPE_S / 2)
        return found

    def check_boards(self, expected_empty: Sequence[str] = EMPTY_IN_THE_DEMO) -> None:
        """Every query of every board runs, and no panel was empty all the time but those of `expected_empty` (titles),
        which have none."""
        empty, full = [], []
        for board in BOARDS:
            for panel in board.panels:
                name = f"{board.title} / {panel.title}"
                if any(self._points(query) for query in panel.queries):
                    full += [name] if panel.title in expected_empty else []
                elif panel.title not in expected_empty:
                    empty.append(name)
        assert not empty, f"panels without data: {', '.join(empty)}"
        assert not full, f"panels with data that should have none: {', '.join(full)}"

    def check_rules(self) -> None:
        """Prometheus took all rules and evaluates each without an error."""
        with urllib.request.urlopen(f"{self.url}/api/v1/rules", timeout=10) as reply:
            groups = json.load(reply)["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert rules, "Prometheus has no rules"
        broken = {rule["name"]: rule["lastError"] for rule in rules if rule.get("lastError")}
        assert not broken, broken

    def firing(self) -> set[str]:
        """Names of the alerts that fire or are about to."""
        return {series["metric"]["alertname"] for series in self.query("ALERTS")}

    def render(self, directory: Path) -> list[Path]:
        """Draws a PNG of each board."""
        from tests.cluster.pictures import draw

        directory.mkdir(parents=True, exist_ok=True)
        return [draw(self, board, directory / f"{board.name}.png") for board in BOARDS]

    def series(self, query: Query) -> list[Series]:
        """What a panel's query shows over time."""
        return self.query_range(self.expression(query))

    def expression(self, query: Query) -> str:
        values = {"namespace": self.namespace, "job": ".*", "pool": ".*", "__rate_interval": RATE}
        return filled(query.expression, values)

    @property
    def log(self) -> str:
        return (self._directory / "log").read_text()[-2000:]

    def _points(self, query: Query) -> list[float]:
        """Numbers that it shows; NaN is none."""
        values = (float(value) for series in self.series(query) for _, value in series["values"])
        return [value for value in values if not math.isnan(value)]

    def _get(self, path: str, **parameters: Any) -> list[Series]:
        data = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}", data, timeout=30) as reply:
                found: list[Series] = json.load(reply)["data"]["result"]
                return found
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters['query']}: {json.load(error)['error']}") from None

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._process is not None
            assert self._process.poll() is None, f"prometheus ended: {self.log}"
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"prometheus is not ready: {self.log}")


class Prometheus(Server):
    """Prometheus for a release in a cluster, with the alert rules of its chart. The release itself may run without
    monitoring."""

    def __init__(self, cluster: Cluster, release: str) -> None:
        found = {item["kind"]: item for item in _monitoring(cluster, release)}
        jobs = [service_job(found["ServiceMonitor"]), pod_job(found["PodMonitor"])]
        super().__init__(jobs, cluster.namespace, found["PrometheusRule"]["spec"])
        self._discovery = Discovery(cluster, self._directory)

    def __enter__(self) -> Self:
        self._discovery.start()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        self._discovery.stop()
        super().__exit__()


def _monitoring(cluster: Cluster, release: str) -> list[dict[str, Any]]:
    """The monitors and rules that the chart renders for the release's values."""
    values = json.loads(cluster.helm("get", "values", release, "--all", "--output", "json"))
    for part in ("serviceMonitor", "podMonitor", "prometheusRule"):
        values["monitoring"][part]["enabled"] = True
    values["networkPolicy"]["enabled"] = False  # its addresses are asked of the cluster, which a rendering does not
    templates = [f"--show-only=templates/{name}.yaml" for name in ("servicemonitor", "podmonitor", "prometheusrule")]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        text = cluster.helm("template", release, str(CHART), "--values", file.name, *templates)
    return [item for item in yaml.safe_load_all(text) if item]


def service_job(monitor: Mapping[str, Any]) -> dict[str, Any]:
    """Finds targets like the Prometheus operator: every endpoint of the selected Services whose port has the name."""
    (endpoint,) = monitor["spec"]["endpoints"]
    port = _keep("__meta_kubernetes_endpointslice_port_name", endpoint["port"])
    return _job(monitor, endpoint, "endpointslice", "service", port)


def pod_job(monitor: Mapping[str, Any]) -> dict[str, Any]:
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    running = [
        _keep("__meta_kubernetes_pod_container_port_name", endpoint["port"]),
        _keep("__meta_kubernetes_pod_phase", "Running"),
    ]
    return _job(monitor, endpoint, "pod", "pod", *running)


def _job(
    monitor: Mapping[str, Any], endpoint: Mapping[str, Any], role: str, of: str, *keep: Mapping[str, Any]
) -> dict[str, Any]:
    selector = monitor["spec"]["selector"]
    chosen = [_keep(_label(of, name), value) for name, value in selector["matchLabels"].items()]
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", expression
        chosen.append(_keep(_label(of, expression["key"]), "|".join(expression["values"])))
    namespaces = "|".join(monitor["spec"]["namespaceSelector"]["matchNames"])
    return {
        "job_name": monitor["metadata"]["name"],
        "honor_labels": endpoint["honorLabels"],
        "metrics_path": endpoint["path"],
        "file_sd_configs": [{"files": [f"{role}.json"], "refresh_interval": "5s"}],
        "relabel_configs": [
            _keep("__meta_kubernetes_namespace", namespaces),
            *chosen,
            *keep,
            {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
            {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
            *(_snake(rule) for rule in endpoint.get("relabelings", ())),
        ],
    }


def _keep(source: str, regex: str) -> dict[str, Any]:
    return {"action": "keep", "source_labels": [source], "regex": regex}


def _label(of: str, name: str) -> str:
    return f"__meta_kubernetes_{of}_label_{sanitized(name)}"


def _snake(rule: Mapping[str, Any]) -> dict[str, Any]:
    """The operator's names of a relabeling's parts → Prometheus's."""
    return {re.sub("([A-Z])", lambda match: f"_{match[1].lower()}", name): value for name, value in rule.items()}


def static_jobs(metrics: Mapping[str, str], namespace: str) -> list[dict[str, Any]]:
    """Scrape configurations of processes on this machine: name → host:port."""
    return [
        {
            "job_name": name,
            "honor_labels": True,
            "static_configs": [{"targets": [address], "labels": {"namespace": namespace, "pod": name}}],
        }
        for name, address in metrics.items()
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
