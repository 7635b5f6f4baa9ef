"""The wire between two processes: lost silently, lost by reset, and restored."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from flowfleet.local.ports import free_ports
from tests.faults.tools.proxy import HOST, TcpProxy

SHORT_S = 0.3


@pytest.fixture
def proxy() -> Iterator[TcpProxy]:
    """In front of a server that sends back what it gets."""
    listener = socket.create_server((HOST, 0))

    def echo(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1024):
                    connection.sendall(data)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    proxy = TcpProxy(free_ports(1)[0], listener.getsockname()[1])
    proxy.start()
    yield proxy
    proxy.close()
    listener.close()


def connect(proxy: TcpProxy) -> socket.socket:
    connection = socket.create_connection((HOST, proxy.port), timeout=5.0)
    connection.settimeout(5.0)
    return connection


def test_bytes_go_through_both_ways_and_the_end_too(proxy: TcpProxy) -> None:
    with connect(proxy) as connection:
        connection.sendall(b"one")
        assert connection.recv(16) == b"one"
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(16) == b""


def test_a_silent_loss_holds_every_byte_until_the_network_is_back(proxy: TcpProxy) -> None:
    with connect(proxy) as connection:
        connection.sendall(b"before")
        assert connection.recv(16) == b"before"
        proxy.lose("silent")
        connection.sendall(b"during")
        connection.settimeout(SHORT_S)
        with pytest.raises(TimeoutError):
            connection.recv(16)
        with connect(proxy) as late:
            late.settimeout(SHORT_S)
            late.sendall(b"late")
            with pytest.raises(TimeoutError):
                late.recv(16)
            proxy.restore()
            connection.settimeout(5.0)
            late.settimeout(5.0)
            assert connection.recv(16) == b"during"
            assert late.recv(16) == b"late"


def test_a_reset_ends_connections_and_refuses_new_ones(proxy: TcpProxy) -> None:
    with connect(proxy) as connection:
        connection.sendall(b"before")
        assert connection.recv(16) == b"before"
        proxy.lose("reset")
        with pytest.raises(ConnectionResetError):
            connection.recv(16)
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    proxy.restore()
    with connect(proxy) as connection:
        connection.sendall(b"after")
        assert connection.recv(16) == b"after"


def test_restoring_what_was_not_lost_does_nothing(proxy: TcpProxy) -> None:
    proxy.restore()
    with connect(proxy) as connection:
        connection.sendall(b"still")
        assert connection.recv(16) == b"still"
