"""The chart's Grafana boards, read from their JSON: the panels, what each queries and how it is drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parents[2] / "deploy" / "helm" / "flowfleet" / "dashboards"


@dataclass(frozen=True)
class Query:
    expression: str
    """Grafana's variables are not filled in."""
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    row: str
    json: Mapping[str, Any]

    @property
    def title(self) -> str:
        return str(self.json["title"])

    @property
    def description(self) -> str:
        return str(self.json["description"])

    @property
    def kind(self) -> str:
        """Grafana's type: stat, timeseries or heatmap."""
        return str(self.json["type"])

    @property
    def queries(self) -> list[Query]:
        targets = self.json["targets"]
        return [Query(one["expr"], one.get("legendFormat", "").replace("__auto", "")) for one in targets]

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Unit, bounds and lines of all its series."""
        found: Mapping[str, Any] = self.json["fieldConfig"]["defaults"]
        return found

    @property
    def unit(self) -> str:
        return str(self.defaults["unit"])

    @property
    def stacked(self) -> bool:
        return bool(self.defaults["custom"]["stacking"]["mode"] == "normal")

    @property
    def colors(self) -> dict[str, str]:
        """Legend → color, where it has a meaning."""
        overrides = self.json["fieldConfig"]["overrides"]
        return {one["matcher"]["options"]: one["properties"][0]["value"]["fixedColor"] for one in overrides}


@dataclass(frozen=True)
class Board:
    name: str
    json: Mapping[str, Any]

    @property
    def title(self) -> str:
        return str(self.json["title"]).removeprefix("Flowfleet / ")

    @property
    def description(self) -> str:
        return str(self.json["description"])

    @cached_property
    def panels(self) -> list[Panel]:
        """Panels without the rows, each with its row's title."""
        row, found = "", []
        for panel in self.json["panels"]:
            if panel["type"] == "row":
                row = panel["title"]
            else:
                found.append(Panel(row, panel))
        return found


BOARDS = [Board(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(DIRECTORY.glob("*.json"))]
