"""On a shared machine a state directory is its owner's alone, and a file that others could write steers nothing."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from flowfleet.local.files import Watched, read_own, write_atomically
from flowfleet.local.processes import read_records
from flowfleet.local.session import stop_stack
from flowfleet.local.stack import Stack, StackError, StateDir
from flowfleet.local.supervision.cleanup import end_stack

NOBODY = 65_534
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".target"))
    path.symlink_to(path.with_suffix(".target"))


MADE_FOREIGN: list[object] = [
    pytest.param(lambda path: path.chmod(0o664), id="of-the-group"),
    pytest.param(lambda path: path.chmod(0o602), id="of-everyone"),
    pytest.param(_link, id="a-link"),
    pytest.param(lambda path: os.chown(path, NOBODY, -1), id="of-another", marks=ROOT_ONLY),
]


@pytest.fixture(params=[0o000, 0o022, 0o077])
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize("is_there", [False, True])
def test_a_state_directory_is_its_owners_alone(tmp_path: Path, is_there: bool) -> None:
    state = StateDir(tmp_path / "runs" / "local")
    if is_there:
        state.path.mkdir(parents=True)
        state.path.chmod(0o777)
        state.lock_file.touch()
        state.lock_file.chmod(0o666)
    with state.lock():
        assert stat.S_IMODE(state.path.stat().st_mode) == 0o700
        assert stat.S_IMODE(state.lock_file.stat().st_mode) == 0o600
        assert state.supervisor_pid() == os.getpid()


def _modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path.is_dir()}


@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize("mode", [0o755, 0o700, 0o1777])
def test_a_folder_that_holds_other_things_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    """A project's folder, or /tmp: only what the stack has in it is private, also at the second start."""
    (tmp_path / "train.py").touch()
    (tmp_path / "trainers").mkdir()
    (tmp_path / "logs.target").mkdir(mode=0o750)
    (tmp_path / "logs").symlink_to(tmp_path / "logs.target")
    linked = stat.S_IMODE((tmp_path / "logs.target").stat().st_mode)
    tmp_path.chmod(mode)
    for _ in range(2):
        with StateDir(tmp_path).lock():
            assert stat.S_IMODE(tmp_path.stat().st_mode) == mode
            found = _modes(tmp_path)
            assert {found.pop("logs"), found.pop("logs.target")} == {linked}
            assert {"secrets", "redis", "trainers", "processes"} <= found.keys()
            assert set(found.values()) == {0o700}
    assert ("jobs" in found) == (mode != 0o700)


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_no_stack_runs_where_others_could_replace_its_files(tmp_path: Path, mode: int) -> None:
    (tmp_path / "train.py").touch()
    tmp_path.chmod(mode)
    with pytest.raises(StackError, match=r"other users may write.*chmod go-w.*give another --state-dir"):
        StateDir(tmp_path).make()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == mode
    tmp_path.chmod(0o755)
    StateDir(tmp_path).make()


def test_an_empty_folder_that_is_shared_on_purpose_stays_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    StateDir(tmp_path).make()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777


@ROOT_ONLY
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775])
def test_root_may_use_a_folder_of_another_user(tmp_path: Path, mode: int) -> None:
    os.chown(tmp_path, NOBODY, -1)
    tmp_path.chmod(mode)
    with StateDir(tmp_path).lock():
        assert tmp_path.stat().st_uid == NOBODY
        assert set(_modes(tmp_path).values()) == {0o700}


@ROOT_ONLY
@pytest.mark.parametrize("name", ["secrets", "redis", "jobs", "trainers"])
def test_no_folder_is_used_that_another_user_put_there(tmp_path: Path, name: str) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / name).mkdir()
    os.chown(tmp_path / name, NOBODY, -1)
    with pytest.raises(StackError, match=f"{name} belongs to the user {NOBODY}.*give another --state-dir"):
        StateDir(tmp_path).make()


@ROOT_ONLY
def test_users_but_root_use_no_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(tmp_path, NOBODY, -1)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY - 1)
    with pytest.raises(StackError, match=f"belongs to the user {NOBODY}.*give another --state-dir"):
        StateDir(tmp_path).make()


def _of_an_earlier_release(state: StateDir, umask: int) -> None:
    """Modes of what a release wrote that heeded the umask."""
    for path in [state.path, *state.path.rglob("*")]:
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


@pytest.mark.parametrize("umask", [0o002, 0o000])
@pytest.mark.parametrize("folder", ["processes", "trainers"])
def test_processes_of_an_earlier_release_are_ended(
    tmp_path: Path, umask: int, folder: str, victim: subprocess.Popen[bytes]
) -> None:
    state = StateDir(tmp_path)
    (tmp_path / folder).mkdir()
    started = psutil.Process(victim.pid).create_time()
    (tmp_path / folder / "a.json").write_text(json.dumps({"pid": victim.pid, "started": started}))
    _of_an_earlier_release(state, umask)
    assert stop_stack(state)
    assert victim.wait() is not None


@pytest.mark.parametrize("others", [False, True])
def test_down_ends_a_live_stack_of_an_earlier_release_at_once(tmp_path: Path, others: bool) -> None:
    state = StateDir(tmp_path)
    script = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); "
    script += "import os; f.write(str(os.getpid())); f.flush(); print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script, str(state.lock_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.read(2) == b"\n\n"
        _of_an_earlier_release(state, 0o002)
        if others:
            (tmp_path / "train.py").touch()
            tmp_path.chmod(0o755)
        assert stop_stack(state)
        assert supervisor.wait() == -signal.SIGTERM


def test_down_makes_no_folder(tmp_path: Path) -> None:
    assert not stop_stack(StateDir(tmp_path / "none"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make_foreign", MADE_FOREIGN)
def test_what_another_user_could_write_is_not_read(tmp_path: Path, make_foreign: Callable[[Path], None]) -> None:
    path = tmp_path / "a.json"
    tmp_path.chmod(0o755)
    path.write_text("ours")
    path.chmod(0o644)
    assert read_own(path) == "ours"
    make_foreign(path)
    with pytest.raises(OSError, match=r"not believed|symbolic links"):
        read_own(path)


@pytest.mark.parametrize("make_foreign", MADE_FOREIGN)
def test_a_foreign_record_ends_no_process(
    tmp_path: Path, make_foreign: Callable[[Path], None], victim: subprocess.Popen[bytes]
) -> None:
    state = StateDir(tmp_path)
    started = float(Path(f"/proc/{victim.pid}").stat().st_ctime)
    for folder in (state.records, state.trainers):
        folder.mkdir()
        (folder / "rollout-0.json").write_text(json.dumps({"pid": victim.pid, "started": started}))
        make_foreign(folder / "rollout-0.json")
        assert list(read_records(folder)) == []
    end_stack(state, grace_s=0.1)
    assert victim.poll() is None


@pytest.mark.parametrize("make_foreign", MADE_FOREIGN)
@pytest.mark.parametrize("name", ["stack.json", "supervisor.pid"])
def test_no_client_follows_a_foreign_stack(tmp_path: Path, make_foreign: Callable[[Path], None], name: str) -> None:
    state = StateDir(tmp_path)
    (tmp_path / "train.py").touch()
    tmp_path.chmod(0o755)
    with state.lock():
        state.write(Stack(url="http://127.0.0.1:1", redis_url="", state_dir="", supervisor=os.getpid(), processes={}))
        assert state.read() is not None
        make_foreign(state.path / name)
        assert state.read() is None


@ROOT_ONLY
def test_down_signals_no_process_that_another_user_names(tmp_path: Path, victim: subprocess.Popen[bytes]) -> None:
    state = StateDir(tmp_path)
    with state.lock():
        state.lock_file.write_text(str(victim.pid))
        os.chown(state.lock_file, NOBODY, -1)
        with pytest.raises(OSError, match="not believed"):
            stop_stack(state)
    assert victim.poll() is None


def test_a_watched_file_has_changed_once_for_each_content(tmp_path: Path) -> None:
    file = tmp_path / "pools.json"
    watched = Watched(file)
    assert not watched.has_changed()
    for text in ("a", "b"):
        write_atomically(file, text)
        assert [watched.has_changed(), watched.has_changed()] == [True, False]
    file.unlink()
    assert not watched.has_changed()
