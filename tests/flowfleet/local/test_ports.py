import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowfleet.local import ports
from flowfleet.local.ports import FIRST_PORT, LAST_PORT, free_ports, is_free


def test_ports_are_different_free_and_below_the_ephemeral_range() -> None:
    found = free_ports(20)

    assert len(set(found)) == 20
    assert all(FIRST_PORT <= port < LAST_PORT and is_free(port) for port in found)


def test_a_port_in_use_is_passed_over() -> None:
    first = free_ports(1, rng=random.Random(3))[0]
    with socket.create_server(("127.0.0.1", first)):
        assert not is_free(first)
        assert first not in free_ports(1, rng=random.Random(3))


RESERVE = """
import random
from flowfleet.local.ports import free_ports
print(*free_ports(3, rng=random.Random(5)), flush=True)
input()
"""


@contextmanager
def reserved(folder: Path) -> Iterator[set[int]]:
    """Ports of a process while it lives. Processes with another folder do not know of them."""
    command = [sys.executable, "-c", RESERVE]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout is not None
        yield {int(port) for port in other.stdout.readline().split()}
        other.communicate("\n")


def test_ports_of_another_process_are_passed_over_until_it_ends(tmp_path: Path) -> None:
    with reserved(tmp_path) as first:
        assert len(first) == 3
        assert all(is_free(port) for port in first)
        with reserved(tmp_path) as second:
            assert len(second) == 3
            assert not first & second
    with reserved(tmp_path) as again:
        assert again == first


def test_too_many_ports_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "LAST_PORT", FIRST_PORT + 5)  # all ports would be missing elsewhere meanwhile
    with pytest.raises(OSError, match="no 6 free ports"):
        free_ports(6)
