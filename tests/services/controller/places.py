"""Places of trainers that a test's launcher has, as `Launcher` asks for them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class Places:
    """`count` jobs at once."""

    def __init__(self, count: int = 1) -> None:
        self._count, self._jobs = count, dict[str, None]()

    @property
    def admitted(self) -> Collection[str]:
        return self._jobs.keys()

    async def admit(self, job_id: str, spec: Any) -> str:
        if job_id not in self._jobs and len(self._jobs) >= self._count:
            return f"one of {self._count} places"
        self._jobs[job_id] = None
        return ""

    async def leave(self, job_id: str) -> None:
        self._jobs.pop(job_id, None)
