"""`python -m flowfleet.process.forkserver MODULE… FD`: has imported the modules and forks processes that run them.

Saves the seconds that a service takes to import torch. `forks.py` is its client. FD is a listening Unix socket of
messages (SOCK_SEQPACKET). A connection is one order, so that an answer cannot belong to another one:

    client  an `Order` as JSON, with the descriptors of standard input, output and error
    child   {"pid": …, "started": …}, about itself
    client  {} once it has noted that; a child whose client is gone instead ends before it has run anything
    server  {"code": …}, when the child has ended

A child runs `python -m MODULE` by its order's command line, environment and folder. With `ranks` it is an agent, which
forks so many such processes; the first that fails ends them all, and none outlives its agent. Children outlive this
process, which ends when its standard input does.

A module's `preload`, if it has one, imports what it would import later. Nothing that is imported may start a thread or
touch an accelerator.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from flowfleet.process.service import end_with_parent, usable_cpus
from flowfleet.redis.server import free_port

MESSAGE_BYTES: Final = 2**18
ORDER_S: Final = 5.0
"""Longest wait for the order of a client that has connected."""


@dataclass(frozen=True)
class Order:
    """A process to fork."""

    module: str
    argv: list[str]
    """Command line without interpreter and module."""
    env: dict[str, str]
    """Its whole environment."""
    cwd: str = field(default_factory=os.getcwd)
    session: bool = True
    """Leads a session of its own."""
    ranks: int = 0
    """Processes that an agent forks in turn; 0: the process runs the module itself."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, message: bytes) -> Order:
        return cls(**json.loads(message))


def serve(listener: socket.socket, names: Sequence[str]) -> None:
    """Imports the modules and forks until standard input ends."""
    os.dup2(2, 1)
    for name in names:
        _preload(name)
    if (started := threading.active_count() - 1) > 0:
        raise RuntimeError(f"an import of {', '.join(names)} started threads: {started}; forks need none")
    tasks = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    if len(tasks) > 1:  # some builds of torch start native ones, which no fork has
        print(f"imports of {', '.join(names)} started native threads: {', '.join(tasks[1:])}", file=sys.stderr)
    gc.collect()
    gc.freeze()  # so that a collection in a child copies no pages
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    return
                if key.fileobj is listener:
                    _take(listener, selector)
                else:
                    _tell(key, selector)


def _preload(name: str) -> None:
    module: Any = importlib.import_module(name)
    if hasattr(module, "__path__"):  # `-m` runs the package's __main__
        module = importlib.import_module(f"{name}.__main__")
    getattr(module, "preload", lambda: None)()


def _take(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    """Forks the process of a new connection."""
    connection, _ = listener.accept()
    connection.settimeout(ORDER_S)
    try:
        message, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        order = Order.from_bytes(message) if len(files) == 3 else None
    except (OSError, ValueError, TypeError):
        order, files = None, []
    pid = os.fork() if order is not None else None
    if order is not None and pid == 0:
        with _ending():
            for key in [*selector.get_map().values()]:
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
                if key.data is not None:
                    key.data[1].close()
                    os.close(key.fd)
            _child(order, files, connection)
    for file in files:
        os.close(file)
    if pid is None:
        connection.close()
        return
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))


def _tell(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    """Tells the client of a process that has ended."""
    pid, connection = key.data
    selector.unregister(key.fd)
    os.close(key.fd)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):  # it may be gone
        connection.send(json.dumps({"code": code}).encode())
    connection.close()


def _child(order: Order, files: Sequence[int], connection: socket.socket) -> NoReturn:
    if order.session:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if not _is_wanted(connection):
        os._exit(0)
    os.chdir(order.cwd)
    os.environ.clear()
    os.environ.update(order.env)
    if not sys.flags.safe_path:
        sys.path[:1] = [] if order.env.get("PYTHONSAFEPATH") else [order.cwd]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    _end(_agent(order) if order.ranks else _run(order))


def _is_wanted(connection: socket.socket) -> bool:
    """Tells the client about this process; False where the client is gone before it has noted that."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(None)
        connection.send(json.dumps({"pid": os.getpid(), "started": start_ticks(os.getpid())}).encode())
        return bool(connection.recv(MESSAGE_BYTES))
    return False


def start_ticks(pid: int) -> str:
    """When a process started, in kernel ticks since boot: tells it from a later one of the same id. Empty once it is
    gone or a zombie. It is field 22 of /proc/PID/stat."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _run(order: Order) -> int:
    """Runs `python -m MODULE` here."""
    if "torch" in sys.modules:  # its OpenMP read this when it was imported
        sys.modules["torch"].set_num_threads(int(order.env.get("OMP_NUM_THREADS") or usable_cpus()))
    sys.argv = [order.module, *order.argv]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # it has been imported: so it should
        for name in (f"{order.module}.__main__", order.module):
            if name in sys.modules and not hasattr(sys.modules[name], "__path__"):
                del sys.modules[name]
        runpy.run_module(order.module, run_name="__main__", alter_sys=True)
    return 0


def _agent(order: Order) -> int:
    """Runs the ranks to their end: 0, or 1 when one of them failed."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the ranks hear it themselves: they are in this process's group
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = {_fork_rank(rank, order): rank for rank in range(order.ranks)}
    while ranks:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        rank = ranks.pop(pid)
        if code != 0:
            how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
            print(f"rank {rank} {how}", file=sys.stderr, flush=True)
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            for _ in ranks:
                os.wait()
            return 1
    return 0


def _fork_rank(rank: int, order: Order) -> int:
    pid = os.fork()
    if pid:
        return pid
    with _ending():
        end_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order.ranks, "LOCAL_WORLD_SIZE": order.ranks}
        os.environ |= {name: str(value) for name, value in of_rank.items()}
        _end(_run(order))
    return pid


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Ends a forked process whatever happens inside: it must not continue its parent's work."""
    try:
        yield
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        _end(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
    except BaseException:
        traceback.print_exc()
    _end(1)


def _end(code: int) -> NoReturn:
    """Ends as the interpreter does, but for its search of memory: waits for threads, runs what was registered."""
    shut_down: Callable[[], None] = getattr(threading, "_shutdown")  # noqa: B009
    with contextlib.suppress(Exception):
        shut_down()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


def main(argv: Sequence[str]) -> None:
    with socket.socket(fileno=int(argv[-1])) as listener:
        path = Path(listener.getsockname())
        try:
            serve(listener, argv[:-1])
        finally:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.parent.rmdir()


if __name__ == "__main__":
    main(sys.argv[1:])
