import random
import socket
import subprocess
import sys

import pytest

from flowfleet.local.ports import FIRST_PORT, LAST_PORT, free_ports, is_free


def test_ports_are_different_free_and_below_the_ephemeral_range() -> None:
    ports = free_ports(20)

    assert len(set(ports)) == 20
    assert all(FIRST_PORT <= port < LAST_PORT and is_free(port) for port in ports)


def test_a_port_in_use_is_passed_over() -> None:
    first = free_ports(1, rng=random.Random(3))[0]
    with socket.create_server(("127.0.0.1", first)):
        assert not is_free(first)
        assert first not in free_ports(1, rng=random.Random(3))


def test_ports_of_another_process_are_passed_over_until_it_ends() -> None:
    reserve = (
        "import random; from flowfleet.local.ports import *; print(*free_ports(3, rng=random.Random(5)), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{reserve}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = [int(port) for port in other.stdout.readline().split()]
        assert len(theirs) == 3
        assert all(is_free(port) for port in theirs)
        assert not set(theirs) & set(free_ports(3, rng=random.Random(5)))
        other.communicate("\n")
    assert free_ports(3, rng=random.Random(5)) == theirs


def test_too_many_ports_are_refused() -> None:
    with pytest.raises(OSError, match="no 20000 free ports"):
        free_ports(20_000)
