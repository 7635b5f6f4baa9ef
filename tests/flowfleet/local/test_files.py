"""On a shared machine a state directory is its owner's alone, and a file that others could write steers nothing."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowfleet.local.files import make_private, read_own
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


@ROOT_ONLY
def test_no_stack_runs_in_a_folder_of_another_user(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, -1)
    with pytest.raises(PermissionError):
        make_private(tmp_path)
    with (
        pytest.raises(StackError, match=f"belongs to the user {NOBODY}.*give another --state-dir"),
        StateDir(tmp_path).lock(),
    ):
        pass


@pytest.mark.parametrize("make_foreign", MADE_FOREIGN)
def test_what_another_user_could_write_is_not_read(tmp_path: Path, make_foreign: Callable[[Path], None]) -> None:
    path = tmp_path / "a.json"
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
