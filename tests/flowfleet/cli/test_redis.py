from __future__ import annotations

import stat
from pathlib import Path

from typer.testing import CliRunner

from flowfleet.cli import main as cli
from flowfleet.redis import acl as redis_acl


def test_the_commands_and_passwords_of_a_redis_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "passwords"
    first = CliRunner().invoke(cli.app, ["redis-acl", str(folder)])
    assert {file.name for file in folder.iterdir()} == {*redis_acl.RULES}
    words = {kind: (folder / kind).read_text() for kind in redis_acl.RULES}
    assert len({*words.values()}) == len(words)
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert first.stdout == redis_acl.setuser_lines(words)
    assert not any(word in first.output for word in words.values())

    again = CliRunner().invoke(cli.app, ["redis-acl", str(folder), "--redis6"])
    assert again.stdout == redis_acl.setuser_lines(words, selectors=False)
    (folder / "trainer").write_text("\n")
    empty = CliRunner().invoke(cli.app, ["redis-acl", str(folder)])
    assert (empty.exit_code, "is empty" in empty.output) == (1, True)
