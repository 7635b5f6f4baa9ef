"""Devices of this machine: each is one owner's, also after the controller was restarted."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.local.devices import Devices, pool_owner

NAMES = ("0", "1", "2", "3")


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 6))))
def test_no_device_is_given_twice_or_lost(moves: list[tuple[str, int]]) -> None:
    """0: the job leaves; 6: the controller starts again."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "devices.json"
        devices = Devices(file, NAMES)
        for job_id, count in moves:
            before = dict(devices.of)
            if count == 6:
                devices = Devices(file, NAMES)
                assert devices.of == before
            elif count == 0:
                devices.leave(job_id)
                assert job_id not in devices.of
            else:
                free = len(NAMES) - sum(map(len, before.values()))
                why = devices.take(job_id, count)
                assert (why == "") == (job_id in before or min(count, len(NAMES)) <= free)
                assert devices.of.get(job_id) == before.get(job_id) or not why
            given_out = [name for held in devices.of.values() for name in held]
            assert len(given_out) == len(set(given_out))


def test_a_trainer_of_more_ranks_than_there_are_places_is_alone(tmp_path: Path) -> None:
    devices = Devices(tmp_path / "devices.json", NAMES)
    assert devices.take("large", 9) == ""
    assert devices.of == {"large": NAMES}
    assert devices.take("small", 1) == "1 of the 4 places of trainers on this machine"


def test_devices_of_jobs_that_have_ended_are_free(tmp_path: Path) -> None:
    devices = Devices(tmp_path / "devices.json", NAMES)
    devices.take("a", 2)
    devices.take("b", 2)
    devices.keep_only(["b"])
    assert devices.of == {"b": ("2", "3")}
    assert devices.take("c", 2) == ""


@pytest.mark.parametrize("stored", ["", "[]", '{"a": 3}', '{"a": ["0", "9"]}'])
def test_a_table_that_cannot_be_read_or_names_other_devices_gives_none(tmp_path: Path, stored: str) -> None:
    file = tmp_path / "devices.json"
    file.write_text(stored)
    file.chmod(0o600)
    devices = Devices(file, NAMES)
    assert devices.of == {}
    assert devices.take("a", 4) == ""


def test_pools_take_devices_from_trainers_and_give_them_back(tmp_path: Path) -> None:
    """Two processes share the table: the controller's launcher, and the supervisor with `flowfleet pools`."""
    controller, supervisor = Devices(tmp_path / "devices.json", NAMES), Devices(tmp_path / "devices.json")
    controller.take("job", 1)
    supervisor.begin({pool_owner("default"): ["4", "5"], "reward pickscore": ["6"]}, trainers_take_more=True)
    assert controller.of == {"job": ("0",)}
    with supervisor.changing() as table:
        table[pool_owner("large")] = ("2", "3")
    assert controller.names == ("0", "1")
    assert controller.take("second", 2) == "2 of the 2 places of trainers on this machine"
    controller.keep_only([])
    supervisor.release(pool_owner("large"))
    supervisor.release(pool_owner("default"))
    assert controller.names == (*NAMES, "4", "5")
    assert controller.take("second", 6) == ""
    with supervisor.changing() as table:
        assert table["second"] == (*NAMES, "4", "5")


def test_a_stack_that_starts_knows_of_no_pool_of_the_last_one_and_takes_no_device_twice(tmp_path: Path) -> None:
    table = Devices(tmp_path / "devices.json", NAMES)
    table.begin({pool_owner("gone"): ["7"]}, trainers_take_more=True)
    for job_id in ("a", "b"):
        table.take(job_id, 2)
    table.begin({pool_owner("large"): ["2"], pool_owner("shares"): []}, trainers_take_more=False)
    assert dict(table.table) == {"a": ("0", "1"), pool_owner("large"): ("2",)}
    table.release(pool_owner("large"))
    assert table.names == NAMES  # the operator chose them
