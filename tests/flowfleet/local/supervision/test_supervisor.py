"""The supervisor over real processes: a Redis server and a process with the standard gRPC health service."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import redis

from flowfleet.local.plan import HOST, Kind, Plan, ProcessPlan
from flowfleet.local.ports import free_ports
from flowfleet.local.session import stop_stack
from flowfleet.local.stack import MARK, Stack, StackError, StateDir
from flowfleet.local.supervision.child import MAX_MISSED, Child
from flowfleet.local.supervision.supervisor import Supervisor
from flowfleet.process.logs import MAX_LOG_BYTES
from flowfleet.redis.server import command, new_password, server_url

HEALTHY = """
import signal, sys, time
from concurrent import futures
import grpc
from grpc_health.v1 import health, health_pb2_grpc
server = grpc.server(futures.ThreadPoolExecutor(1))
servicer = health.HealthServicer()
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
signal.signal(signal.SIGUSR1, lambda *_: servicer.enter_graceful_shutdown())
server.add_insecure_port(sys.argv[1])
server.start()
while True:
    time.sleep(120)
"""
SUPERVISE = """
import sys, threading
from pathlib import Path
from flowfleet.local.stack import MARK, StateDir
from flowfleet.local.supervision.supervisor import Supervisor
from tests.flowfleet.local.supervision.test_supervisor import make
state = StateDir(Path(sys.argv[1]))
with state.lock():
    supervisor = Supervisor(make(state), state, hang_s=float(sys.argv[2]))
    supervisor.run(threading.Event(), lambda stack: print("ready", flush=True))
"""


def make(state: StateDir, reward: str = HEALTHY) -> Plan:
    redis_port, reward_port = free_ports(2)
    password = new_password()
    env = {MARK: str(state.path)}
    address = f"{HOST}:{reward_port}"
    return Plan(
        (
            ProcessPlan("redis", Kind.REDIS, tuple(command(state.redis, redis_port, password)), f"{HOST}:{redis_port}"),
            ProcessPlan("reward-x", Kind.REWARD, (sys.executable, "-c", reward, address), address, env=env),
        ),
        url="http://unused",
        redis_url=server_url(redis_port, password),
    )


@contextmanager
def running(state: StateDir, plan: Plan, start_timeout_s: float = 60.0, hang_s: float = 120.0) -> Iterator[Stack]:
    """A supervisor in a thread, from ready to stopped."""
    stop, ready = threading.Event(), threading.Event()
    stacks: list[Stack] = []
    errors: list[StackError] = []

    def announce(stack: Stack) -> None:
        stacks.append(stack)
        ready.set()

    def run() -> None:
        try:
            with state.lock():
                Supervisor(plan, state, start_timeout_s=start_timeout_s, hang_s=hang_s).run(stop, announce)
        except StackError as error:
            errors.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(60)
        if errors:
            raise errors[0]
        yield stacks[0]
    finally:
        stop.set()
        thread.join(60)


def eventually(true: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_killed_process_comes_back_on_its_port_and_stop_ends_all(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with running(state, make(state)) as stack:
        assert oct(state.stack_file.stat().st_mode)[-3:] == "600"
        with redis.Redis.from_url(stack.redis_url) as client:
            client.set("kept", "yes")
        os.kill(stack.processes["redis"].pid, signal.SIGKILL)

        eventually(lambda: _process(state, "redis") not in (0, stack.processes["redis"].pid))
        eventually(lambda: _answers(stack.redis_url))
        with redis.Redis.from_url(stack.redis_url) as client:
            assert client.get("kept") == b"yes"
        pids = [process.pid for process in (state.read() or stack).processes.values()]

    assert all(gone(pid) for pid in pids)
    assert state.read() is None
    assert not state.stack_file.exists()


def test_what_does_not_answer_or_denies_its_health_is_killed_and_comes_back(tmp_path: Path) -> None:
    """A stopped process takes no SIGTERM, so it is SIGKILL."""
    state = StateDir(tmp_path)
    with running(state, make(state), hang_s=4.0) as stack:
        before = {name: process.pid for name, process in stack.processes.items()}
        began = time.monotonic()
        os.kill(before["redis"], signal.SIGSTOP)
        os.kill(before["reward-x"], signal.SIGUSR1)
        for name, pid in before.items():
            eventually(lambda name=name, pid=pid: _process(state, name) not in (0, pid))  # type: ignore[misc]
        assert 1.0 < time.monotonic() - began < 4.0 + 5.0
        eventually(lambda: _answers(stack.redis_url))
    assert all(gone(pid) for pid in before.values())


def test_only_good_answers_in_a_row_that_are_missing_count(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.logs.mkdir(parents=True)
    plan = ProcessPlan("x", Kind.REWARD, (sys.executable, "-c", "import time; time.sleep(60)"), f"{HOST}:1")
    child = Child(plan, state, start_timeout_s=600.0)
    child.start()
    try:
        for answers in (
            [False] * 100,  # it has never served: it starts
            [True, *[False] * (MAX_MISSED - 1), True, *[False] * (MAX_MISSED - 1)],
        ):
            for answer in answers:
                child.checked(child.pid, answer)
            child.checked(child.pid + 1, False)  # of its predecessor
            child.poll()
            assert child.exit_code() is None
        child.checked(child.pid, False)
        child.poll()
        eventually(lambda: child.exit_code() == -signal.SIGKILL)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)


def test_one_that_never_serves_again_is_killed_too(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.logs.mkdir(parents=True)
    plan = ProcessPlan("x", Kind.REWARD, (sys.executable, "-c", "import time; time.sleep(60)"), f"{HOST}:1")
    child = Child(plan, state, start_timeout_s=0.2)
    child.start()
    child.poll()
    assert child.exit_code() is None
    time.sleep(0.3)
    child.poll()
    eventually(lambda: child.exit_code() == -signal.SIGKILL)


def test_one_that_cannot_be_started_again_is_tried_later_and_needs_no_record(tmp_path: Path) -> None:
    """Neither a full disk nor a failed fork ends the supervisor, and so the stack."""
    state = StateDir(tmp_path)
    state.logs.mkdir(parents=True)
    state.records.write_text("no directory")
    plan = ProcessPlan("x", Kind.REWARD, (sys.executable, "-c", "import sys; sys.exit(3)"), f"{HOST}:1")
    child = Child(plan, state, start_timeout_s=600.0)
    child.start()
    first = child.pid
    eventually(lambda: child.exit_code() == 3)
    away = state.logs.rename(tmp_path / "away")
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        assert not child.poll()
        time.sleep(0.02)
    assert child.pid == first
    away.rename(state.logs)
    eventually(child.poll)
    assert child.pid != first


def test_a_full_disk_ends_no_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """stack.json names the new process as soon as it can be written."""
    state = StateDir(tmp_path)
    with running(state, make(state)) as stack:
        full = threading.Event()
        write = StateDir.write

        def written(self: StateDir, stack: Stack) -> None:
            if full.is_set():
                raise OSError(28, "No space left on device")
            write(self, stack)

        monkeypatch.setattr(StateDir, "write", written)
        full.set()
        before = stack.processes["reward-x"].pid
        os.kill(before, signal.SIGKILL)
        time.sleep(1.0)
        assert _process(state, "reward-x") == before
        full.clear()
        eventually(lambda: _process(state, "reward-x") not in (0, before))


@pytest.mark.long
def test_every_log_of_a_stack_has_a_limit(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    logs = [state.log(name) for name in ("redis", "supervisor", "watchdog", "forkserver", "trainers")]
    with running(state, make(state)):
        for log in logs:
            with log.open("ab") as file:
                file.truncate(MAX_LOG_BYTES + 1)
        eventually(lambda: all(log.stat().st_size <= MAX_LOG_BYTES for log in logs))


def test_a_suspended_supervisor_kills_nobody_for_its_own_sleep(tmp_path: Path) -> None:
    """What died meanwhile is started again, and `down` ends it although it is suspended."""
    state = StateDir(tmp_path)
    hang_s = 4.0
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, str(tmp_path), str(hang_s)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == "ready\n"
    stack = state.read()
    assert stack is not None
    time.sleep(1.0)  # questions are under way
    supervisor.send_signal(signal.SIGSTOP)
    os.kill(stack.processes["reward-x"].pid, signal.SIGKILL)
    time.sleep(1.5 * hang_s)
    supervisor.send_signal(signal.SIGCONT)
    eventually(lambda: _process(state, "reward-x") not in (0, stack.processes["reward-x"].pid))
    time.sleep(hang_s)
    assert _process(state, "redis") == stack.processes["redis"].pid
    supervisor.send_signal(signal.SIGSTOP)
    supervised = [child.pid for child in psutil.Process(supervisor.pid).children()]
    threading.Thread(target=supervisor.wait, daemon=True).start()
    stopper = threading.Thread(target=stop_stack, args=(state,))
    stopper.start()
    stopper.join(30)
    assert not stopper.is_alive()
    eventually(lambda: all(gone(pid) for pid in supervised))


def test_a_process_that_cannot_start_is_told_with_its_log(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    broken = "import sys; print('no such scorer'); sys.exit(3)"

    with (
        pytest.raises(StackError, match=r"(?s)reward-x ended with code 3.*no such scorer"),
        running(state, make(state, broken)),
    ):
        pass

    assert state.read() is None


def test_a_process_that_never_serves_is_waited_for_no_longer_than_said(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    loading = "import time; print('loading', flush=True); time.sleep(60)"

    with (
        pytest.raises(StackError, match=r"(?s)reward-x does not serve after 2 s.*loading"),
        running(state, make(state, loading), start_timeout_s=2.0),
    ):
        pass

    assert state.read() is None


def test_a_second_supervisor_is_refused(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with running(state, make(state)), pytest.raises(StackError, match="already running"), state.lock():
        pass


def test_a_killed_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, str(tmp_path), "120"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == "ready\n"
    stack = state.read()
    assert stack is not None
    assert stack.supervisor == supervisor.pid

    supervisor.kill()
    supervisor.wait()

    eventually(lambda: all(gone(process.pid) for process in stack.processes.values()))
    eventually(lambda: not state.stack_file.exists())
    assert state.read() is None
    with state.lock():
        pass  # a new one may start


def _process(state: StateDir, name: str) -> int:
    try:
        return int(json.loads(state.stack_file.read_text())["processes"][name]["pid"])
    except FileNotFoundError:
        return 0


def _answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url, retry=None) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False
