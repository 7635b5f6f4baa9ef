"""A copy of some objects of the cluster that follows them: list once, then watch, for as long as it runs.

A watch that ends is taken up where it was. One that is too old, and one that broke by whatever it met, begins with a
new list, after a growing delay while that does not help; until then the copy stays as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable

from flowfleet.backoff import backoff_s
from flowfleet.errors import FlowfleetError
from services.controller.platforms.kubernetes.api import KubernetesApi, Object, Refused, Resource

log = logging.getLogger(__name__)

MIN_DELAY_S = 0.5
MAX_DELAY_S = 15.0


class Mirror:
    """`objects` by name, those with the labels of `selector`. Start `run` as a task."""

    def __init__(self, api: KubernetesApi, resource: Resource, selector: str) -> None:
        self._api = api
        self._resource = resource
        self._selector = selector
        self._version = ""
        """Where the next watch begins; empty: with a list."""
        self._changed = asyncio.Event()
        self.objects: dict[str, Object] = {}
        self.synced = asyncio.Event()
        """The first list is here."""
        self.problem = ""
        """Why it could not be read the last time."""
        self._broken_at: float | None = None

    @property
    def kind(self) -> str:
        return self._resource.plural

    @property
    def stale_s(self) -> float:
        """Seconds since the mirror last followed; 0 while all is well."""
        return 0.0 if self._broken_at is None else time.monotonic() - self._broken_at

    async def run(self) -> None:
        """Follows until cancelled."""
        failures = 0
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                failures = 0
            except Exception as error:  # callers that wait for a stale copy would wait forever
                unknown = not isinstance(error, FlowfleetError | Refused | ValueError)
                log.warning("mirror of %s is stale: %s", self.kind, error, exc_info=unknown)
                self.problem, self._version = str(error) or type(error).__name__, ""
                self._broken_at = self._broken_at or time.monotonic()
                failures += 1
                await asyncio.sleep(backoff_s(failures, MIN_DELAY_S, MAX_DELAY_S) * random.uniform(0.5, 1.5))

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits for the copy to fulfill a condition; False when it did not in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._changed.wait()
        return condition()

    def put(self, kept: Object) -> None:
        """An object as a call of ours returned it, before the watch tells of it."""
        self.objects.setdefault(kept["metadata"]["name"], kept)
        self._tell()

    async def _list(self) -> None:
        items, self._version = await self._api.list(self._resource, self._selector)
        self.objects = {item["metadata"]["name"]: item for item in items}
        self.problem, self._broken_at = "", None
        self.synced.set()
        self._tell()

    async def _watch(self) -> None:
        async for kind, seen in self._api.watch(self._resource, self._selector, self._version):
            self._version = seen["metadata"]["resourceVersion"]
            if kind == "DELETED":
                self.objects.pop(seen["metadata"]["name"], None)
            elif kind != "BOOKMARK":
                self.objects[seen["metadata"]["name"]] = seen
            self._tell()

    def _tell(self) -> None:
        """Wakes all that wait."""
        self._changed.set()
        self._changed = asyncio.Event()
