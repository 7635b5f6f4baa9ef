"""Processes of the fork server are as those of `python -m`: command line, environment, files, signals, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowfleet.process import forks
from flowfleet.process.commands import forkserver_command
from flowfleet.process.forks import Address, Forked, ForkServer
from flowfleet.process.forkserver import Order
from flowfleet.process.started import StartedProcess
from tests.waiting import wait_until

MODULE = "tests.flowfleet.process.forked_module"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    output = tmp_path_factory.mktemp("forks") / "server.log"
    server = ForkServer(forkserver_command(sys.executable, MODULE), lambda: dict(os.environ), output)
    yield server
    server.close()


@pytest.fixture
def start(server: ForkServer, tmp_path: Path) -> Iterator[Callable[..., StartedProcess]]:
    started: list[StartedProcess] = []

    def start(*argv: str, address: Address | None = None, module: str = MODULE, **changes: Any) -> StartedProcess:
        env = {**os.environ, **changes.pop("env", {})}
        with (tmp_path / "out").open("ab") as output, (tmp_path / "err").open("ab") as error:
            command = [sys.executable, "-m", module, *argv]
            changes |= {"output": output.fileno(), "error": error.fileno()}
            started.append(StartedProcess(command, env=env, address=address or server.ensure(), **changes))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_a_forked_process_is_as_one_of_exec(how: str, start: Callable[..., StartedProcess], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    env = {"FLOWFLEET_SAID": "é", "GOMP_SPINCOUNT": "9"} if how == "exec" else {"FLOWFLEET_SAID": "é"}
    process = start("tell", env=env, session=True, cwd=str(folder) if how == "fork" else None)
    assert process.wait(30) == 0
    told = json.loads((tmp_path / "out").read_text())
    assert (tmp_path / "err").read_text() == "to stderr\n"
    assert told["pid"] == told["group"] == told["session"] == process.pid
    assert told["cwd"] == (str(folder) if how == "fork" else os.getcwd())
    assert (told["env"]["FLOWFLEET_SAID"], told["stdin"]) == ("é", "")
    assert isinstance(process._process, Forked) == (how == "fork")
    assert {**told["env"], "LC_CTYPE": ""} == {**os.environ, **env, "LC_CTYPE": ""}


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (("exit", "7"), 7, ""),
        (("exit", "in words"), 1, "in words"),
        (("raise",), 1, "ValueError: wrong"),
        (("nothing",), 0, ""),
    ],
)
def test_exit_codes(
    argv: tuple[str, ...], code: int, said: str, start: Callable[..., StartedProcess], tmp_path: Path
) -> None:
    process = start(*argv)
    assert process.wait(30) == code == process.poll() == process.returncode
    assert said in (tmp_path / "err").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signals_end_it_as_they_end_any_process(number: signal.Signals, start: Callable[..., StartedProcess]) -> None:
    process = start("sleep").started()
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    time.sleep(0.2)
    process.send_signal(number)
    assert process.wait(30) == (1 if number == signal.SIGINT else -number)
    process.send_signal(number)  # ended: nothing happens to whoever has the id now


def test_ranks_are_numbered_and_end_with_the_first_that_fails(
    start: Callable[..., StartedProcess], tmp_path: Path
) -> None:
    assert start("tell", ranks=2).wait(30) == 0
    ranks = [json.loads(line)["env"] for line in (tmp_path / "out").read_text().splitlines()]
    assert sorted(env["RANK"] for env in ranks) == ["0", "1"]
    assert {env["WORLD_SIZE"] for env in ranks} == {"2"}
    assert start("exit", "3", ranks=2).wait(30) == 1
    assert "failed with exit code 3" in (tmp_path / "err").read_text()


def test_a_process_outlives_its_server_and_is_watched_on(start: Callable[..., StartedProcess], tmp_path: Path) -> None:
    own = ForkServer(forkserver_command(sys.executable, MODULE), lambda: dict(os.environ), tmp_path / "own.log")
    process = start("sleep", address=own.ensure()).started()
    own.close()
    time.sleep(0.2)
    assert process.poll() is None
    process.kill()
    assert process.wait(10) == forks.LOST


@pytest.mark.parametrize("fault", ["gone", "stopped", "broken"])
def test_a_server_that_cannot_fork_is_stood_in_for_by_exec(
    fault: str, start: Callable[..., StartedProcess], tmp_path: Path
) -> None:
    modules = [MODULE, "tests.flowfleet.process.threaded_module"] if fault == "broken" else [MODULE]
    own = ForkServer(forkserver_command(sys.executable, *modules), lambda: dict(os.environ), tmp_path / "own.log")
    address = own.ensure()
    if fault == "gone":
        own.close()
    if fault == "stopped":
        assert own._process is not None
        os.kill(own._process.pid, signal.SIGSTOP)
    process = start("exit", "5", address=address, within_s=0.5 if fault == "stopped" else 30.0).started()
    assert process.wait(30) == 5
    assert isinstance(process._process, subprocess.Popen)
    own.close()
    if fault == "broken":
        assert "threads: 1; forks need none" in (tmp_path / "own.log").read_text()


def test_a_process_that_was_given_up_runs_nothing(server: ForkServer, tmp_path: Path) -> None:
    order = Order(MODULE, ["mark", str(tmp_path / "ran")], dict(os.environ))
    server.order(order, (0, 1, 2)).abandon()
    taken: list[int] = []

    def refuse(pid: int, started: str) -> None:
        taken.append(pid)
        raise OSError(28, "No space left on device")

    forked = server.order(order, (0, 1, 2), refuse)
    with pytest.raises(OSError, match="No space"):
        forked.wait(30)
    wait_until(lambda: not Path(f"/proc/{taken[0]}").exists())
    assert not (tmp_path / "ran").exists()


def test_the_server_ends_with_its_owner_and_leaves_no_folder(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from flowfleet.process.forks import ForkServer; "
        "from flowfleet.process.commands import forkserver_command; "
        f"s = ForkServer(forkserver_command(sys.executable, {MODULE!r}), lambda: dict(os.environ), Path(sys.argv[1])); "
        "print(s.ensure().path, s._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "log")]
    path, pid = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60).stdout.split()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text())
    assert not Path(path).parent.exists()


def test_what_imports_may_depend_on_is_not_forked(server: ForkServer) -> None:
    address = server.ensure()
    env = dict(os.environ)
    assert address.forks(MODULE, {**env, "FLOWFLEET_REDIS_URL": "x", "OMP_NUM_THREADS": "7"})
    assert not address.forks("tests.other", env)
    for name in ("LD_PRELOAD", "PYTHONPATH", "HF_HOME", "FLOWFLEET_FP8_MIN_SIZE", "GOMP_SPINCOUNT"):
        assert not address.forks(MODULE, {**env, name: "x"})


def test_services_start_no_thread_when_they_are_imported() -> None:
    """The fork server of tests would not serve: it imports them all."""
    from tests.forks import address

    process = StartedProcess(
        [sys.executable, "-m", "services.rollout", "--help"], env=os.environ, output=os.dup(1), address=address()
    )
    assert process.wait(120) == 0
    assert isinstance(process._process, Forked)
