"""Writes the boards into the chart."""

from __future__ import annotations

from deploy.dashboards import BOARDS, DIRECTORY
from deploy.dashboards.model import to_json

for board in BOARDS:
    (DIRECTORY / f"{board.name}.json").write_text(to_json(board), encoding="utf-8")
    print(DIRECTORY / f"{board.name}.json")
