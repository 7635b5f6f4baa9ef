"""The controller's own metrics; those of jobs come from the runner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge
from redis.exceptions import RedisError

from services.controller.store.store import Store

log = logging.getLogger(__name__)

PERIOD_S = 5.0


async def count_jobs(store: Store, registry: CollectorRegistry, leads: Callable[[], bool]) -> None:
    """Keeps `flowfleet_controller_jobs{status}` true, until cancelled. Only the controller that leads shows it, so that
    a sum over controllers counts each job once."""
    gauge = Gauge("flowfleet_controller_jobs", "Jobs by status", ["status"], registry=registry)
    while True:
        try:
            counts = await store.lists.counts() if leads() else {}
            gauge.clear()
            for status, count in counts.items():
                gauge.labels(status=str(status)).set(count)
        except RedisError as error:
            log.warning("could not count jobs: %s", error)
        await asyncio.sleep(PERIOD_S)
