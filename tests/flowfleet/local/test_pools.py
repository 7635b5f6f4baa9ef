"""What a pool is, as `flowfleet up --pool` and `flowfleet pools add` take it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from flowfleet.local.plan import StackOptions, make_plan, ports_needed
from flowfleet.local.pools import Pool, parse_devices, parse_pool, read_pools, write_pools
from flowfleet.local.secrets import StackSecrets
from flowfleet.local.session import plan_stack
from flowfleet.local.stack import StackError


@pytest.mark.parametrize(
    ("text", "pool"),
    [
        ("large", Pool(name="large", dtype="bfloat16")),
        ("large:replicas=2,dtype=float32", Pool(name="large", replicas=2)),
        (
            "large:devices=0-2,max-batch=8",
            Pool(name="large", replicas=3, devices=("0", "1", "2"), max_batch=8, dtype="bfloat16"),
        ),
        (
            "w:devices=4,5,6,7,sequence_parallel_size=2",
            Pool(name="w", replicas=2, devices=("4", "5", "6", "7"), sequence_parallel_size=2, dtype="bfloat16"),
        ),
        ("large:adapter-slots=0", Pool(name="large", adapter_slots=0, dtype="bfloat16")),
        ("large:model=org/name", Pool(name="large", model="org/name", dtype="bfloat16")),
    ],
)
def test_a_pool_has_its_own_settings_and_else_the_usual_ones(text: str, pool: Pool) -> None:
    assert parse_pool(text, {"dtype": "bfloat16"}) == pool


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Large", "pool Large: name: 'Large': give up to 40 lowercase letters"),
        ("a:", "'' is not a setting: write key=value; keys are adapter_slots, devices, dtype,"),
        ("a:replica=2", "'replica=2' is not a setting"),
        ("a:added=true", "'added=true' is not a setting"),
        ("a:replicas=two", "pool a:replicas=two: replicas: 'two' is not a whole number"),
        ("a:replicas=0", "replicas: Input should be greater than or equal to 1"),
        (
            "a:replicas=3,devices=0-1",
            "pool a:replicas=3,devices=0-1: it names 2 accelerators for 3 rollouts: one is for each",
        ),
        ("a:devices=0,0", "give each once, as in 0,1 or 0-3"),
        ("a:devices=3-1", "give each once"),
        ("a:engine=other", "engine"),
        ("a:engine=vllm,sequence_parallel_size=2", "engine=diffusers to the pool"),
        (
            "a:engine=vllm-omni,adapter_slots=4",
            "pool a:engine=vllm-omni,adapter_slots=4: adapter slots 4: only the engine",
        ),
        ("a:sequence_parallel_size=2,adapter_slots=4", "adapter_slots=0 to the pool"),
        ("a:adapter_slots=-1", "adapter_slots: Input should be greater than or equal to 0"),
        ("a:model=no/such/folder", "model no/such/folder: there is no such folder"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_in_words(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"pool|devices|model") as refused:
        parse_pool(text)
    assert message in str(refused.value)


def test_devices_have_names_or_numbers() -> None:
    assert parse_devices("0,2-4, GPU-1234-5678") == ("0", "2", "3", "4", "GPU-1234-5678")


def test_pools_have_names_of_their_own_and_so_have_their_rollouts(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="pool a is given twice"):
        StackOptions(pools=(Pool(name="a"), Pool(name="a", replicas=2)))
    options = StackOptions(state_dir=tmp_path, pools=(Pool(replicas=2), Pool(name="a", engine="vllm", max_batch=3)))
    plan = make_plan(options, range(20_000, 20_000 + ports_needed(options)), ["redis-server"], StackSecrets())
    rollouts = [process for process in plan.processes if process.pool]
    assert [(one.name, one.pool, one.engine) for one in rollouts] == [
        ("rollout-0", "default", "diffusers"),
        ("rollout-1", "default", "diffusers"),
        ("rollout-a-0", "a", "vllm"),
    ]
    argv = rollouts[-1].argv
    assert [argv[argv.index(flag) + 1] for flag in ("--pool", "--max-batch")] == ["a", "3"]


def test_added_pools_are_there_at_the_next_start_unless_the_flags_name_them(tmp_path: Path) -> None:
    options = StackOptions(state_dir=tmp_path, port=0, pools=(Pool(name="a"), Pool(name="b", replicas=2)))
    plan_stack(options)
    file = tmp_path / "pools.json"
    assert [*read_pools(file)] == ["a", "b"]
    write_pools(file, [Pool(name="b", replicas=7, added=True), Pool(name="c", added=True), Pool(name="d")])
    plan = plan_stack(options)
    assert {pool.name: pool.replicas for pool in plan.placement.pools} == {"a": 1, "b": 2, "c": 1}
    assert read_pools(file)["c"].added
    file.write_text("[")
    with pytest.raises(StackError, match=r"pools.json cannot be read: remove it"):
        plan_stack(options)


def test_a_device_that_is_not_there_or_given_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nfor i in 0 1 2 3; do echo GPU $i: H200; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("FLOWFLEET_DEVICE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    state = tmp_path / "stack"
    with pytest.raises(StackError, match=r"accelerator 9 is asked for.*change --pool.*or `flowfleet pools remove`"):
        plan_stack(StackOptions(state_dir=state, port=0, pools=(parse_pool("a:devices=9"),)))
    twice = (parse_pool("a:devices=0-1"), parse_pool("b:devices=1-2"))
    with pytest.raises(StackError, match="accelerator 1 is given twice, to pool a and pool b: give it to one of them"):
        plan_stack(StackOptions(state_dir=state, port=0, pools=twice))
    with pytest.raises(StackError, match="accelerator 1 is given twice, to pool a and reward ocr"):
        plan_stack(StackOptions(state_dir=state, port=0, pools=twice[:1], rewards=("ocr:devices=1",)))
    plan = plan_stack(StackOptions(state_dir=state, port=0, pools=twice[1:], rewards=("ocr:devices=0",)))
    assert plan.placement.trainer == ("3",)
    devices = {process.name: process.devices for process in plan.processes if process.devices}
    assert devices == {"rollout-b-0": ("1",), "rollout-b-1": ("2",), "reward-ocr": ("0",)}
