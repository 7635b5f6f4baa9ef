"""The plan of a chaos stack: every wire goes through a proxy, the reward is ours, and clocks can be set."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowfleet.local.plan import Plan, StackOptions
from flowfleet.local.pools import Pool
from flowfleet.local.session import plan_stack
from tests.faults.run import possible
from tests.faults.schedule import KINDS
from tests.faults.stack import DEVICE, wired
from tests.faults.tools.clocks import LIBRARY, Clocks, find_library


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv(DEVICE, "cpu")
    return plan_stack(StackOptions(state_dir=tmp_path / "stack", port=0, pools=(Pool(replicas=2),)))


def test_no_process_reaches_another_but_through_a_proxy(plan: Plan, tmp_path: Path) -> None:
    ports = {process.name: process.address.rpartition(":")[2] for process in plan.processes}
    changed, proxies = wired(plan, tmp_path / "reward.json", Clocks(tmp_path, None))
    front = {str(proxy.port): str(proxy.target_port) for proxy in proxies.values()}
    for process in changed.processes:
        if process.name == "redis":
            continue
        words = [*process.argv, *(value for name, value in process.env.items() if "REDIS_URL" in name)]
        others = [port for name, port in ports.items() if name != process.name]
        assert not [word for word in words for port in others if f"127.0.0.1:{port}" in word]
    rollout = next(process for process in changed.processes if process.name == "rollout-1")
    advertised = rollout.argv[rollout.argv.index("--advertise") + 1].rpartition(":")[2]
    assert front[advertised] == ports["rollout-1"]
    assert set(front.values()) == {port for name, port in ports.items() if name != "controller"}
    assert {"rollout-0-redis", "rollout-1-redis", "controller-redis", "controller-reward"} <= set(proxies)


def test_the_reward_is_the_one_that_can_be_told_to_fail(plan: Plan, tmp_path: Path) -> None:
    changed, proxies = wired(plan, tmp_path / "reward.json", Clocks(tmp_path, None))
    reward = next(process for process in changed.processes if process.name.startswith("reward"))
    assert "tests.faults.reward" in reward.argv
    assert "--scorer" not in reward.argv
    controller = next(process for process in changed.processes if process.name == "controller")
    assert f"brightness=127.0.0.1:{proxies['controller-reward'].port}" in controller.argv


def test_clocks_are_set_by_a_file_of_each_process(plan: Plan, tmp_path: Path) -> None:
    clocks = Clocks(tmp_path / "clocks", tmp_path / "libfaketimeMT.so.1")
    changed, _ = wired(plan, tmp_path / "reward.json", clocks)
    skewed = [process for process in changed.processes if process.name != "redis"]  # it does not start under it
    files = {process.name: Path(process.env["FAKETIME_TIMESTAMP_FILE"]) for process in skewed}
    assert len(set(files.values())) == len(skewed)
    clocks.set("rollout-0", "+3600")
    assert files["rollout-0"].read_text() == "+3600\n"
    assert files["controller"].read_text() == "+0\n"
    clocks.right("rollout-0")
    assert files["rollout-0"].read_text() == "+0\n"


def test_what_the_machine_cannot_do_is_skipped_with_its_reason() -> None:
    kinds, skipped = possible(KINDS, has_clocks=False, has_disk=False)
    assert set(kinds) | set(skipped) == set(KINDS)
    assert "libfaketime" in skipped["skew-clock"]
    assert "root" in skipped["full-disk"]
    assert possible(("kill",), has_clocks=False, has_disk=False) == (("kill",), {})
    assert possible(KINDS, has_clocks=True, has_disk=True) == (KINDS, {})


def test_a_library_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(LIBRARY, str(tmp_path / "missing.so"))
    with pytest.raises(ValueError, match="there is no such file"):
        find_library()
