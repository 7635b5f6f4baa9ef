"""What a job is doing, asked by REST many times a second. Everything that waits for a step or a phase asks here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from flowfleet.api.jobs import TERMINAL

POLL_S = 0.01
TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Sight:
    """The job as it was last seen."""

    step: int = 0
    phase: str = ""
    status: str = ""
    reason: str = ""
    at: float = 0.0
    """Monotonic seconds."""

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL


class Watch:
    """Follows one job until it is closed."""

    def __init__(self, url: str, job_id: str, headers: dict[str, str] | None = None, *, poll_s: float = POLL_S) -> None:
        self._path = f"/v1/jobs/{job_id}"
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, headers=headers, trust_env=False)
        self._poll_s = poll_s
        self._changed = threading.Condition()
        self._sight = Sight(at=time.monotonic())
        self.steps: list[tuple[float, int]] = []
        """When each finished step was first seen."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="watch", daemon=True)
        self._thread.start()

    @property
    def now(self) -> Sight:
        return self._sight

    def until(self, condition: Callable[[Sight], bool], timeout_s: float) -> bool:
        """Waits until a sight fulfills the condition; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self._sight), timeout_s)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(2 * TIMEOUT_S)
        self._http.close()

    def _follow(self) -> None:
        while not self._closed.wait(self._poll_s):
            try:
                response = self._http.get(self._path)
                response.raise_for_status()
            except httpx.HTTPError:
                continue  # the controller is down, or Redis is: that is what we are here for
            job = response.json()
            progress = job["progress"]
            sight = Sight(progress["step"], progress["phase"], job["status"], job["reason"], time.monotonic())
            with self._changed:
                if sight.step > self._sight.step:
                    self.steps.append((sight.at, sight.step))
                self._sight = sight
                self._changed.notify_all()
