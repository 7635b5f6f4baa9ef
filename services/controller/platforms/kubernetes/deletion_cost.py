"""Which rollout pods go first when there are too many: idle ones. Kubernetes removes pods of the lowest deletion cost,
so each pod's cost is the work it has; a removed pod drains (SIGTERM) all the same.

The cost grows with the logarithm of the outstanding samples, so it changes seldom, and few pods are updated at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from flowfleet.errors import Conflict, NotFound, Unavailable
from services.controller.fleet.replicas import Replica
from services.controller.platforms.platform import SetCost

if TYPE_CHECKING:
    from services.controller.ports import Scheduler

log = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
LOOK_S = 1.0
PODS_A_LOOK = 10


def cost(outstanding: int) -> int:
    """0 idle, 10 with one sample, 10 more each time that they double."""
    return 10 * outstanding.bit_length()


class DeletionCosts:
    """Costs that pods have, and so which to update next. A replica's id is its pod's name."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def due(self, replicas: Iterable[Replica]) -> Iterator[tuple[str, int]]:
        """Pods and their costs, the most outdated first; forgets pods that left."""
        costs = {replica.replica_id: cost(replica.outstanding) for replica in replicas}
        self._told = {name: told for name, told in self._told.items() if name in costs}
        changed = [name for name in costs if self._told.get(name) != costs[name]]
        changed.sort(key=lambda name: (name in self._told, -abs(costs[name] - self._told.get(name, 0)), name))
        return ((name, costs[name]) for name in changed[:PODS_A_LOOK])

    def told(self, name: str, cost: int) -> None:
        self._told[name] = cost

    def forget(self) -> None:
        """Another controller may tell them something else."""
        self._told.clear()


async def keep_deletion_costs(runner: Scheduler, set_cost: SetCost) -> None:
    """Sets deletion costs until cancelled, while the scheduler leads."""
    costs = DeletionCosts()
    while True:
        await asyncio.sleep(LOOK_S)
        if not runner.leads:
            costs.forget()
            continue
        for name, number in costs.due(runner.fleet_view()):
            try:
                await set_cost(name, number)
            except (NotFound, Conflict):
                log.info("no pod found for replica %s", name)
            except Unavailable as error:
                log.warning("could not set deletion costs of pods: %s", error)
                break
            except RuntimeError as error:
                log.warning("deletion costs disabled, so a shrinking pool may lose busy pods: %s", error)
                return
            costs.told(name, number)
