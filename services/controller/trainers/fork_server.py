"""The process from which a controller's local trainers are forked: it has imported torch and all the rest once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowfleet.process.forkserver import Order

log = logging.getLogger(__name__)

IMPORTS_S = 300.0
FORK_S = 10.0


class ForkServer:
    """Starts the fork server when it is first needed, and another one when that is gone or hangs."""

    def __init__(self, command: Sequence[str], env: Callable[[], dict[str, str]], output: Path) -> None:
        self._command, self._env, self._output = command, env, output
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def fork(self, order: Order) -> int:
        """The pid of the agent. Raises RuntimeError when there is none to be had."""
        async with self._lock:
            for _ in range(2):
                process = await self._ready()
                assert process.stdin is not None
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(order.to_line())
                    await process.stdin.drain()
                    if answer := await self._answer(process, FORK_S):
                        return int(answer["pid"])
                log.warning("trainer fork server is gone or hangs; starting another one")
                await self._end()
            raise RuntimeError(f"could not fork a trainer; see the log {self._output}")

    async def warm(self) -> None:
        """Has the process ready for the next trainer."""
        async with self._lock:
            await self._ready()

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        with self._output.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=self._env(),
                start_new_session=True,
            )
        if await self._answer(self._process, IMPORTS_S) is None:
            await self._end()
            raise RuntimeError(f"could not start trainers; see the log {self._output}")
        return self._process

    async def _answer(self, process: asyncio.subprocess.Process, timeout_s: float) -> dict[str, Any] | None:
        """None when the process has ended or is late."""
        assert process.stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                line = await process.stdout.readline()
                return json.loads(line) if line else None
        return None

    async def _end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None
