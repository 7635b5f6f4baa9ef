"""Panels, rows and boards, and what they are in Grafana's JSON (schema of Grafana 11).

In expressions `@job`, `@pool` and `@all` stand for the label matchers of what the board's variables choose.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

SCHEMA_VERSION: Final = 39
COLUMNS: Final = 24
MATCHERS: Final = {
    "@job": 'namespace="$namespace", job=~"$job"',
    "@pool": 'namespace="$namespace", pool=~"$pool"',
    "@all": 'namespace="$namespace"',
}
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_HEIGHT: Final = {"stat": 4, "timeseries": 8, "heatmap": 8}

Kind = Literal["timeseries", "stat", "heatmap"]


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""

    @property
    def expression(self) -> str:
        """Query with Grafana's variables unreplaced."""
        found = self.expr
        for name, matchers in MATCHERS.items():
            found = found.replace(name, matchers)
        return found


@dataclass(frozen=True)
class Threshold:
    """From `value` on the panel has this color."""

    value: float
    color: Literal["green", "yellow", "orange", "red", "blue"]


@dataclass(frozen=True)
class Panel:
    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 8
    thresholds: tuple[Threshold, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    stacked: bool = False
    colors: tuple[tuple[str, str], ...] = ()
    """Legend → color, where it has a meaning."""
    key: bool = False
    """Drawn where a board becomes a picture."""
    empty_because: str = ""
    """Why it may have no data. Empty: it always has."""


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    name: str
    title: str
    description: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]


def chart(
    title: str, description: str, *queries: tuple[str, str], unit: str = "short", width: int = 8, **more: Any
) -> Panel:
    """Lines over time. A query is (expression, legend)."""
    return Panel(title, description, tuple(Query(*query) for query in queries), unit, width=width, **more)


def stat(title: str, description: str, expr: str, *, unit: str = "short", width: int = 6, **more: Any) -> Panel:
    """One large number a series."""
    legend = more.pop("legend", "")
    return Panel(title, description, (Query(expr, legend),), unit, "stat", width, **more)


def heatmap(title: str, description: str, expr: str, *, unit: str = "short", width: int = 12, **more: Any) -> Panel:
    """Panel of a histogram's buckets."""
    return Panel(title, description, (Query(expr, "{{le}}"),), unit, "heatmap", width, **more)


def to_json(board: Board) -> str:
    return json.dumps(dashboard(board), indent=2, ensure_ascii=False) + "\n"


def dashboard(board: Board) -> dict[str, Any]:
    return {
        "uid": f"flowfleet-{board.name}",
        "title": f"Flowfleet / {board.title}",
        "description": board.description,
        "tags": ["flowfleet"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [_links()],
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": list(_laid_out(board)),
    }


def _laid_out(board: Board) -> Iterator[dict[str, Any]]:
    """Rows one below the other, panels from left to right."""
    number, top = 1, 0
    for row in board.rows:
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
        }
        number, top, left, tallest = number + 1, top + 1, 0, 0
        for panel in row.panels:
            height = _HEIGHT[panel.kind]
            if left + panel.width > COLUMNS:
                top, left, tallest = top + tallest, 0, 0
            place = {"x": left, "y": top, "w": panel.width, "h": height}
            yield _panel(panel, number, place)
            number, left, tallest = number + 1, left + panel.width, max(tallest, height)
        top += tallest


def _panel(panel: Panel, number: int, place: Mapping[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": dict(place),
        "targets": [_target(panel, index, query) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "options": _OPTIONS[panel.kind],
    }


def _target(panel: Panel, index: int, query: Query) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "editorMode": "code",
        "expr": query.expression,
        "legendFormat": query.legend or "__auto",
        "range": panel.kind != "stat",
        "instant": panel.kind == "stat",
        "format": "heatmap" if panel.kind == "heatmap" else "time_series",
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green" if panel.thresholds else "blue", "value": None}]
    steps += [{"color": threshold.color, "value": threshold.value} for threshold in panel.thresholds]
    found: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.kind == "timeseries":
        found |= {"color": {"mode": "palette-classic"}, "custom": _lines(panel)}
    elif panel.kind == "stat":
        found |= {"color": {"mode": "thresholds"}}
    if panel.minimum is not None:
        found["min"] = panel.minimum
    if panel.maximum is not None:
        found["max"] = panel.maximum
    return found


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    return [
        {
            "matcher": {"id": "byName", "options": legend},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
        }
        for legend, color in panel.colors
    ]


def _lines(panel: Panel) -> dict[str, Any]:
    return {
        "drawStyle": "line",
        "lineWidth": 2,
        "fillOpacity": 40 if panel.stacked else 8,
        "showPoints": "never",
        "spanNulls": True,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"},
    }


_OPTIONS: Final[Mapping[Kind, dict[str, Any]]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "textMode": "auto",
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 64, "exponent": 0.5, "reverse": False},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": False},
        "yAxis": {"axisPlacement": "left"},
    },
}


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}},
        _variable("namespace", "Namespace", "label_values(flowfleet_controller_jobs, namespace)", several=False),
        _variable("job", "Job", 'label_values(flowfleet_job_samples_trained_total{namespace="$namespace"}, job)'),
        _variable("pool", "Pool", 'label_values(flowfleet_fleet_replicas{namespace="$namespace"}, pool)'),
    ]


def _variable(name: str, label: str, query: str, *, several: bool = True) -> dict[str, Any]:
    every: dict[str, Any] = {"includeAll": True, "multi": True, "allValue": ".*"} if several else {"includeAll": False}
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "current": {"text": "All", "value": "$__all"} if several else {},
        **every,
    }


def _links() -> dict[str, Any]:
    return {
        "type": "dashboards",
        "title": "Flowfleet",
        "tags": ["flowfleet"],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
    }
