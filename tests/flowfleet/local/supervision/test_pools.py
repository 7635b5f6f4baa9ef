"""Pools that come and go while a supervisor runs, over real processes with the standard gRPC health service."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flowfleet.local.devices import Devices, pool_owner
from flowfleet.local.plan import HOST, Kind, Plan, ProcessPlan
from flowfleet.local.pool_changes import add_pool, remove_pool
from flowfleet.local.pools import Pool, parse_pool, read_pools, write_pools
from flowfleet.local.stack import MARK, Stack, StackError, StateDir
from tests.flowfleet.local.supervision.test_supervisor import HEALTHY, eventually, gone, make, running


def stack_at(state: StateDir) -> Stack:
    stack = state.read()
    assert stack is not None
    return stack


DIES = "import sys; sys.exit('no such model')"


def stack_of(state: StateDir, trainers: tuple[str, ...] = ()) -> Plan:
    def of_pool(pool: Pool, ports: Iterator[int]) -> list[ProcessPlan]:
        env, code = {MARK: str(state.path)}, DIES if pool.model else HEALTHY
        plans = []
        for index in range(pool.replicas):
            name, address = f"rollout-{pool.name}-{index}", f"{HOST}:{next(ports)}"
            argv = (sys.executable, "-c", code, address)
            plans.append(ProcessPlan(name, Kind.ROLLOUT, argv, address, env=env, pool=pool.name))
        return plans

    plan = make(state)
    write_pools(state.path / "pools.json", [])
    return replace(plan, of_pool=of_pool, placement=replace(plan.placement, trainer=trainers))


def test_a_pool_is_added_kept_alive_and_removed(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with running(state, stack_of(state)):
        added = add_pool(state, parse_pool("large:replicas=2"), 30.0)
        assert sorted(added) == ["rollout-large-0", "rollout-large-1"]
        with pytest.raises(StackError, match="has a pool 'large': choose another name, or remove that pool first"):
            add_pool(state, parse_pool("large"), 30.0)
        pid = added["rollout-large-1"].pid
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: stack_at(state).processes["rollout-large-1"].pid not in (0, pid))
        pids = [process.pid for process in stack_at(state).processes.values() if process.pool]
        remove_pool(state, "large")
        assert all(map(gone, pids))
        assert sorted(stack_at(state).processes) == ["redis", "reward-x"]
        assert not list(state.records.glob("rollout-*.json"))
        assert add_pool(state, parse_pool("large"), 30.0).keys() == {"rollout-large-0"}
    assert [pool.added for pool in read_pools(tmp_path / "pools.json").values()] == [True]
    remove_pool(state, "large")  # of the next start
    with pytest.raises(StackError, match="has no pool 'large' but none"):
        remove_pool(state, "large")
    with pytest.raises(StackError, match=r"start one by `flowfleet up --pool`; on Kubernetes set `pools.large`"):
        add_pool(state, Pool(name="large"), 1.0)


def test_a_pool_whose_rollout_ends_while_it_starts_is_not_there_and_its_end_is_told(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with running(state, stack_of(state)):
        with pytest.raises(StackError, match=r"rollout-bad-0 ended while it started(.|\n)*no such model"):
            add_pool(state, Pool(name="bad", model="x"), 30.0)
        assert read_pools(tmp_path / "pools.json") == {}
        assert "rollout-bad-0" not in stack_at(state).processes


def test_a_pool_has_accelerators_of_its_own_until_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nfor i in 0 1 2 3; do echo GPU $i: H200; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    for name in ("FLOWFLEET_DEVICE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    state = StateDir(tmp_path / "stack")
    controller = Devices(state.path / "devices.json", ("0", "1", "2", "3"))
    with running(state, stack_of(state, trainers=("0", "1", "2", "3"))):
        controller.begin({}, trainers_take_more=True)
        assert controller.take("job-a", 1) == ""
        with pytest.raises(StackError, match="accelerator 0 is not free, job job-a has it: give the pool other"):
            add_pool(state, parse_pool("large:devices=0-1"), 30.0)
        with pytest.raises(StackError, match="accelerator 7 is asked for, but this machine has accelerators 0 to 3"):
            add_pool(state, parse_pool("large:devices=7"), 30.0)
        with pytest.raises(StackError, match="needs 4 accelerators, but free are only: 1, 2, 3"):
            add_pool(state, parse_pool("large:replicas=4"), 30.0)
        add_pool(state, parse_pool("large:replicas=2"), 30.0)
        assert controller.table[pool_owner("large")] == ("1", "2")
        assert controller.take("job-b", 2).startswith("2 of the 2 places")
        with pytest.raises(StackError, match="accelerator 2 is not free, pool large has it"):
            add_pool(state, parse_pool("wide:devices=2-3"), 30.0)
        controller.leave("job-a")
        remove_pool(state, "large")
        eventually(lambda: controller.names == ("0", "1", "2", "3"))
        assert controller.take("job-b", 4) == ""
