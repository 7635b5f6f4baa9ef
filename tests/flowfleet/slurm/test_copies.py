"""Copies of Redis's data survive their node, and a copy that was cut short is not taken for one."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from flowfleet.local.stack import StackError
from flowfleet.redis.server import RedisServer
from flowfleet.slurm import copies as module
from flowfleet.slurm.copies import Copies


def test_a_server_goes_on_from_the_newest_copy(tmp_path: Path) -> None:
    shared, server = tmp_path / "shared", RedisServer(tmp_path / "node1")
    shared.mkdir()
    with redis.Redis.from_url(server.start()) as client:
        copies = Copies(server.directory, shared)
        assert not Copies(tmp_path / "node2", shared).restore()
        client.set("step", 1)
        copies.copy()
        client.set("step", 2)
        copies.copy()
        client.set("step", 3)
    server.kill()
    (shared / "redis-copy.new").mkdir()  # of a node that died while it copied
    assert Copies(tmp_path / "node2", shared).restore()
    second = RedisServer(tmp_path / "node2")
    with redis.Redis.from_url(second.start()) as client:
        assert client.get("step") == b"2"
    second.stop()


def test_a_folder_that_another_user_left_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "live").symlink_to(tmp_path / "theirs")
    with pytest.raises(StackError, match="is not a folder of this user: remove it, or set TMPDIR"):
        Copies(tmp_path / "live", tmp_path / "shared").restore()


def test_a_copy_that_fails_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLED_S", 0.0)
    live, shared = tmp_path / "live", tmp_path / "shared"
    live.mkdir()
    shared.mkdir()
    (live / "appendonly.aof").write_text("1")
    copies = Copies(live, shared)
    copies.copy()
    (live / "appendonly.aof").unlink()
    with pytest.raises(OSError, match="no append-only file"):
        copies.copy()
    assert (shared / "redis-copy" / "appendonly.aof").read_text() == "1"
