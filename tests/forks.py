"""Processes of tests, forked from one that has imported all services: a process a worker imports torch once."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowfleet.process.commands import forkserver_command
from flowfleet.process.forks import Address, ForkServer, fork_environment
from flowfleet.process.started import StartedProcess

IMPORTED = ("services.trainer", "services.rollout", "services.reward", "services.controller")
BESIDES = (
    *("flowfleet.local", "flowfleet.local.supervision.watchdog", "tests.flowfleet.idle_controller"),
    *("serve_idle", "serve_renewing", "scripted_controller", "hogging_controller"),
    *("tests.services.rollout.stuck_replica", "tests.services.trainer.replica", "tests.services.trainer.ranked"),
    *("tests.services.trainer.slow_compile", "tests.services.trainer.phased"),
)
ENVIRON: dict[str, str] = {}
"""The variables before the first test, as `conftest.py` notes them. A test may have set others when the first service
starts, and none could be forked after it."""
MODULES = tuple(name if "." in name else f"tests.services.controller.{name}" for name in BESIDES)


@functools.cache
def fork_server() -> ForkServer:
    """The server of this process, which ends with it."""
    log = Path(tempfile.gettempdir()) / f"flowfleet-forks-{os.getpid()}.log"
    server = ForkServer(
        forkserver_command(sys.executable, *IMPORTED), lambda: fork_environment(ENVIRON or os.environ), log, MODULES
    )
    atexit.register(log.unlink, missing_ok=True)
    atexit.register(server.close)
    return server


def address() -> Address:
    return fork_server().ensure()


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    output: int,
    error: int | None = None,
    cwd: Path | None = None,
    session: bool = False,
    ranks: int = 0,
) -> StartedProcess:
    """Starts `python -m MODULE …`, by exec where a fork cannot stand for it: with vLLM, or an environment that imports
    depend on. `ranks` are started by torchrun then."""
    forks = None if any("vllm" in word for word in argv) else address()
    if ranks and not (forks and forks.forks(argv[2], env)):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        argv, ranks = [argv[0], *torchrun, *argv[1:]], 0
    started = StartedProcess(
        argv,
        env=env,
        output=output,
        error=error,
        cwd=None if cwd is None else str(cwd),
        session=session,
        address=forks,
        ranks=ranks,
    )
    return started.started()


def run(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 60.0) -> tuple[int, str]:
    """Runs `python -m MODULE …` to its end. Returns the exit code, and what it wrote."""
    with tempfile.TemporaryFile() as output:
        process = start(argv, env=env, output=output.fileno())
        code = process.wait(timeout_s)
        output.seek(0)
        return code, output.read().decode()
