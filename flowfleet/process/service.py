"""The life of a service process: flags that all services share, secrets beyond loopback, port file, signals.

    def main() -> int:
        parser = rpc_parser("Scores images.")
        parser.add_argument("--scorer", required=True)
        return run_service("reward", serve_reward, parser)   # async def serve_reward(options: argparse.Namespace)

Exit codes: 0 after a drain, 1 on a failure, 2 when the user must change something (said on stderr).
"""

import argparse
import asyncio
import atexit
import ctypes
import gc
import ipaddress
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from flowfleet.errors import FlowfleetError
from flowfleet.filesystem import check_names
from flowfleet.process import telemetry, traces

RPC_TOKEN: Final = "FLOWFLEET_RPC_TOKEN"
RPC_ACCEPT: Final = "FLOWFLEET_RPC_ACCEPT"
API_KEY: Final = "FLOWFLEET_API_KEY"
STATE_DIR: Final = "FLOWFLEET_STATE_DIR"
"""Environment of a trainer: the directory that holds the folders of all jobs."""
TERMINATION_MESSAGE: Final = "FLOWFLEET_TERMINATION_MESSAGE"
"""Names the file in which a trainer says why it ends."""
_PR_SET_PDEATHSIG: Final = 1
LOG_LEVELS: Final = ("debug", "info", "warning", "error")

THREADS: Final = "FLOWFLEET_THREADS"
"""Variable: a trainer's share of the CPUs, in threads a rank."""
PATIENT_THREADS: Final = {"GOMP_SPINCOUNT": "10000"}
"""Environment for processes that share CPUs with others. OpenMP's threads spin long at every barrier by default,
and where two such processes share cores each spins away the other's time: a forward pass took thirty times as long.
Spinning briefly costs nothing when alone; not spinning at all (OMP_WAIT_POLICY=PASSIVE) costs a quarter."""

_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9_][A-Za-z0-9._-]{0,252}):([0-9]{1,5})")

_M_TRIM_THRESHOLD: Final = -1
_M_ARENA_MAX: Final = -8
_M_MMAP_THRESHOLD: Final = -3
_MMAP_FROM_BYTES: Final = 2**25
_KEPT_BYTES: Final = 2**27

log = logging.getLogger(__name__)


def keep_freed_memory() -> None:
    """Has glibc keep up to 128 MiB that were freed, for all threads, and take blocks of up to 32 MiB from them. Does
    nothing elsewhere. For the start of a process, before it has threads.

    Messages with media are allocated and freed all the time. By default each is given back to the kernel, and every
    page is faulted in again: serializing a call of 16 pictures (8.8 MB) takes 3 ms instead of 25 ms (mallopt(3)).
    Arenas of threads give back whatever is beyond 64 MiB: reading 16 pictures for a detector in a thread faults 380
    pages in again, instead of 9,150.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_ARENA_MAX, 1)


def end_soon() -> None:
    """Skips the interpreter's search for reference cycles at exit, which takes seconds with torch. Only for our own
    processes: other code's open files in such cycles would lose unwritten data."""
    atexit.register(gc.freeze)


def usable_cpus() -> int:
    """CPUs that this process may run on, which in a container, or pinned, are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def service_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the shared flags."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; beyond loopback a secret is required")
    parser.add_argument("--port", type=_port, default=0, help="0 takes a free one; see --port-file")
    parser.add_argument("--port-file", type=Path, help="gets host:port once the service answers")
    parser.add_argument("--metrics-port", type=_port, help="serve Prometheus metrics there; 0 takes a free one")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info")
    return parser


def rpc_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the shared flags and those of gRPC services."""
    parser = service_parser(description)
    parser.add_argument("--health-port", type=_port, help="also answer grpc.health.v1 there, plain and without token")
    return parser


def serving(options: argparse.Namespace) -> dict[str, Any]:
    """Gives `rpc.serve` what the flags of `rpc_parser` say."""
    return {name: getattr(options, name) for name in ("host", "port", "port_file", "health_port")}


def run_service(
    name: str,
    main: Callable[[argparse.Namespace], Coroutine[Any, Any, None]],
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
    *,
    secret: str = RPC_TOKEN,
) -> int:
    """Parses flags, sets up logs and metrics, runs `main` to its end and returns the exit code."""
    options = parser.parse_args(argv)
    keep_freed_memory()
    telemetry.configure_logging(name, options.log_level)
    traces.start(name)
    try:
        check_names(sys.argv[1:] if argv is None else argv)
        require_secret(options.host, secret)
        if options.port_file is not None:
            options.port_file.unlink(missing_ok=True)  # of a predecessor that was killed
        if options.metrics_port is not None:
            port = telemetry.start_metrics_server(options.host, options.metrics_port)
            log.info("serving metrics on http://%s/metrics", format_address(options.host, port))
        asyncio.run(main(options))
    except ValueError as error:
        log.debug("refused", exc_info=True)
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except FlowfleetError as error:
        log.error("%s", error)
        return 1
    except Exception:
        log.exception("service failed")
        return 1
    finally:
        traces.stop()
    return 0


def secret(variable: str) -> str | None:
    """The secret in an environment variable; None when it is unset or empty. What a file adds around it is dropped.

    ValueError for one that no header can carry.
    """
    text = os.environ.get(variable, "").strip()
    if not text.isascii() or not all(character.isprintable() for character in text):
        raise ValueError(f"{variable} must be printable ASCII in one line")
    return text or None


def require_secret(host: str, variable: str) -> None:
    """ValueError when `host` is beyond loopback and the environment variable with the secret is not set.

    In place of RPC_TOKEN, RPC_ACCEPT tells callers from strangers as well (flowfleet/rpc/kinds.py).
    """
    is_set = secret(variable) or (variable == RPC_TOKEN and secret(RPC_ACCEPT))
    if not is_loopback(host) and not is_set:
        raise ValueError(
            f"--host {host} can be reached from other machines: set {variable} to a secret that clients must send, "
            "or bind --host 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """True for what only this machine can reach. Names other than localhost count as beyond."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def format_address(host: str, port: int) -> str:
    """host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(address: str) -> str:
    """Returns the address, which is host:port of an IP address or a DNS name. Raises ValueError for anything else, such
    as another scheme of gRPC's (unix:, dns:, xds:), a path or a list."""
    match = _ADDRESS.fullmatch(address)
    if not match or not 0 < int(match[2]) <= 65_535:
        raise ValueError(f"address {address[:200]!r}: give HOST:PORT, as in 127.0.0.1:7001")
    return address


def check_host(host: str) -> str:
    """Returns the host, an IP address (IPv6 without brackets) or a DNS name. Raises ValueError for anything else."""
    check_address(format_address(host, 1))
    return host


def write_port_file(path: Path | None, address: str) -> None:
    """Atomic: a reader finds no file or all of it."""
    if path is None:
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(address, encoding="utf-8")
    os.replace(aside, path)


def stop_on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set the event; from the running loop only."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent dies, however that happens. Does nothing beyond Linux.

    For ranks under torchrun, which starts them in sessions of their own: killed with -9, it would leave them behind.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65_535:
        raise argparse.ArgumentTypeError(f"{port} is not a port (0 to 65535)")
    return port
