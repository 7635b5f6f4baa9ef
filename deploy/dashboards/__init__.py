"""Grafana boards of Flowfleet, described in Python; `python -m deploy.dashboards` writes them into the chart.

model.py    panels, rows and boards, and what they are in Grafana's JSON
boards/     one module a board
promql.py   which metrics an expression reads
"""

from __future__ import annotations

from pathlib import Path

from deploy.dashboards.boards import BOARDS

DIRECTORY = Path(__file__).parents[1] / "helm" / "flowfleet" / "dashboards"
"""Where the chart has them."""

__all__ = ["BOARDS", "DIRECTORY"]
