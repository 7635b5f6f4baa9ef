"""`python -m flowfleet.process.forkserver MODULE`: has imported MODULE and forks processes of it at once.

Free of torch. One order a line of standard input, as JSON of `Order`; one answer a line of standard output: `{"ready":
true}` once MODULE is imported, then `{"pid": …}` for each order. The pid is that of an agent, in a session of its own,
which forks `ranks` processes that run `MODULE.main(argv)`. The first that fails ends them all; none outlives its agent.
Agents outlive this process, which ends when its standard input does.

MODULE's `preload`, if it has one, imports what it would import later. Nothing that is imported may start threads or
touch an accelerator.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from flowfleet.process.service import end_with_parent
from flowfleet.redis.server import free_port

Main = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Order:
    """What an agent starts."""

    argv: list[str]
    """Command line of each rank."""
    log: str
    """File to which agent and ranks append what they print."""
    ranks: int = 1
    env: dict[str, str] = field(default_factory=dict)

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: str) -> Order:
        return cls(**json.loads(line))


def serve(name: str) -> None:
    """Imports the module and forks until standard input ends."""
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # whatever prints must not answer
    module: Any = importlib.import_module(name)
    getattr(module, "preload", lambda: None)()
    gc.collect()
    gc.freeze()  # so that a collection in a child copies no pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # agents that have ended leave no zombie
    print(json.dumps({"ready": True}), file=answers)
    for line in orders:
        pid = os.fork()
        if pid == 0:
            with _ending():
                os.close(orders.fileno())
                os.close(answers.fileno())
                _end(_agent(Order.from_line(line), module.main))
        print(json.dumps({"pid": pid}), file=answers)


def _agent(order: Order, main: Main) -> int:
    """Runs the ranks to their end: 0, or 1 when one of them failed."""
    os.setsid()
    output = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the ranks hear it themselves: they are in this process's group
    os.environ |= {**order.env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = {_fork_rank(rank, order, main): rank for rank in range(order.ranks)}
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


def _fork_rank(rank: int, order: Order, main: Main) -> int:
    pid = os.fork()
    if pid:
        return pid
    with _ending():
        end_with_parent()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order.ranks, "LOCAL_WORLD_SIZE": order.ranks}
        os.environ |= {name: str(value) for name, value in of_rank.items()}
        _end(main(order.argv))
    return pid


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Ends a forked process whatever happens inside: it must not continue its parent's work."""
    try:
        yield
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        _end(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
    _end(1)


def _end(code: int) -> NoReturn:
    """Without the parent's own ends, which it inherited."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
