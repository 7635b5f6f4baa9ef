"""The boards, in the order in which Grafana's links show them."""

from __future__ import annotations

from deploy.dashboards.boards.cost import COST
from deploy.dashboards.boards.data_plane import DATA_PLANE
from deploy.dashboards.boards.fleet import FLEET
from deploy.dashboards.boards.rewards import REWARDS
from deploy.dashboards.boards.training import TRAINING

BOARDS = (TRAINING, FLEET, DATA_PLANE, REWARDS, COST)

__all__ = ["BOARDS"]
