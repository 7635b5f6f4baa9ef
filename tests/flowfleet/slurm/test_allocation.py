"""The nodes of a job, with stand-ins for Slurm's programs, and those on which the fleet refuses to run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from flowfleet.local.stack import StackError
from flowfleet.slurm.allocation import find_allocation, is_inside

ENV = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2", "SLURM_RESTART_COUNT": "1"}
SCONTROL = """#!/bin/sh
[ "$2" = hostnames ] && printf 'n1\\nn2\\n' || printf 'NodeName=n1 NodeAddr=n1\\nNodeName=n2 NodeAddr=10.0.0.2\\n'
"""
SRUN = '#!/bin/sh\nsed "s/WORD/$(cat {folder}/fleet/probe)/" {folder}/answers\n'


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    for name, text in {"scontrol": SCONTROL, "srun": SRUN.format(folder=tmp_path)}.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    usual = {"word": "WORD", "time": time.time(), "gpus": 4, "cpus": 16}
    return {
        "n1": {"node": "n1", **usual, "addresses": {"n1": "127.0.1.1"}, "ports": [20001, 20002, 20005]},
        "n2": {"node": "n2", **usual, "addresses": {"n1": "10.0.0.1"}, "ports": [20002, 20003, 20005]},
    }


def find(folder: Path, answers: dict[str, dict[str, Any]], num_ports: int = 2) -> Any:
    (folder / "answers").write_text("".join(json.dumps(answer) + "\n" for answer in answers.values()))
    return find_allocation(folder / "fleet", num_ports, ENV)


def test_this_node_is_first_and_others_say_how_a_node_is_reached(tmp_path: Path, answers: Any) -> None:
    allocation, ports = find(tmp_path, answers)
    assert [(node.name, node.address, node.gpus) for node in allocation.nodes] == [
        ("n2", "10.0.0.2", 4),
        ("n1", "10.0.0.1", 4),
    ]
    assert allocation.key == "7.1"
    assert ports == [20002, 20005]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n1": {"word": ""}}, "is not the same folder on n1"),
        ({"n1": {"time": 4e9}}, r"the clock of n1 is \+[0-9]{9,} s from this node's"),
        ({"n1": {"ports": [20009]}}, "no 2 ports between 20000 and 32000 are free on all of n2, n1"),
        ({"n1": {"node": "n3"}}, "node n1 did not answer"),
        ({"n1": {"addresses": {}}, "n2": {"addresses": {}}}, "no node knows the address of n1"),
    ],
    ids=["not shared", "clocks apart", "ports taken", "silent", "no DNS"],
)
def test_nodes_on_which_the_fleet_cannot_run(
    tmp_path: Path, answers: Any, change: dict[str, dict[str, Any]], said: str
) -> None:
    for node, values in change.items():
        answers[node].update(values)
    with pytest.raises(StackError, match=said):
        find(tmp_path, answers)
    assert not (tmp_path / "fleet" / "probe").exists()


@pytest.mark.parametrize(
    ("step", "inside"), [(None, True), ("4294967290", True), ("0", False)], ids=["batch", "salloc", "srun"]
)
def test_a_step_has_only_its_share_of_the_job(step: str | None, inside: bool, answers: Any) -> None:
    assert is_inside({**ENV, **({} if step is None else {"SLURM_STEP_ID": step})}) is inside
