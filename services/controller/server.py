"""uvicorn, taught two things: to say where it serves, and to end open event streams before it waits for connections."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from flowfleet.service import format_address, write_port_file
from flowfleet.telemetry import start_metrics_server
from services.controller.services import Services
from services.controller.settings import ControllerSettings

GRACE_S = 10


class Server(uvicorn.Server):
    """SIGTERM and SIGINT: streams end, running requests finish, the runner stops, the process exits 0."""

    def __init__(self, app: FastAPI, settings: ControllerSettings) -> None:
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)
        self._app = app
        self._settings = settings

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, which in the end kills the process by the signal again: here a drain is no failure."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def _services(self) -> Services:
        return self._app.state.services  # type: ignore[no-any-return]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        port = self.servers[0].sockets[0].getsockname()[1]
        if self._settings.metrics_port is not None:
            start_metrics_server(self._settings.host, self._settings.metrics_port, self._services.registry)
        write_port_file(self._settings.port_file, format_address(self._settings.host, port))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._services.closing.set()
        await super().shutdown(sockets)
