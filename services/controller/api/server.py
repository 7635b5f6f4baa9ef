"""uvicorn, taught four things: to say where it serves, to end open event streams before it waits for connections, to
take up new certificates, and to bound its connections (connections.py).
"""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from flowfleet.process.service import format_address, write_port_file
from flowfleet.process.telemetry import start_metrics_server
from flowfleet.rpc.tls import Certificates
from services.controller.api.connections import bounded
from services.controller.api.dependencies import Services
from services.controller.settings import ControllerSettings

GRACE_S = 10
RENEW_EVERY_S = 30.0

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """SIGTERM and SIGINT: streams end, running requests finish, the runner stops, the process exits 0.

    With certificates it speaks HTTPS alone. Clients prove themselves by the API key, and need no certificate.
    """

    def __init__(self, app: FastAPI, settings: ControllerSettings, certificates: Certificates | None = None) -> None:
        self._certificates = certificates
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._renewing: asyncio.Task[None] | None = None
        if certificates is not None:
            certificates.load_pair(self._context)
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            http=bounded(settings.header_timeout_s, settings.max_connections),
            timeout_graceful_shutdown=GRACE_S,
            ssl_context_factory=None if certificates is None else lambda *_: self._context,
        )
        super().__init__(config)
        self._app = app
        self._settings = settings

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals like uvicorn, without killing the process again by the signal: here a drain is not
        a failure."""
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
        if self._certificates is not None:
            self._renewing = asyncio.create_task(self._renew(self._certificates), name="certificates")
        port = self.servers[0].sockets[0].getsockname()[1]
        if self._settings.metrics_port is not None:
            start_metrics_server(self._settings.host, self._settings.metrics_port, self._services.registry)
        write_port_file(self._settings.port_file, format_address(self._settings.host, port))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._services.closing.set()
        if self._renewing is not None:
            self._renewing.cancel()
        await super().shutdown(sockets)

    async def _renew(self, certificates: Certificates) -> None:
        """New connections get the certificate that the folder has."""
        shown = certificates.current()
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            try:
                if (current := certificates.current()) is not shown:
                    certificates.load_pair(self._context)
                    shown = current
            except ValueError as error:  # they changed once more meanwhile
                log.warning("HTTPS keeps its last certificate: %s", error)
