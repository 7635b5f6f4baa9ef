"""A local plan on the nodes of an allocation: who gets which accelerator, which addresses, and where secrets are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowfleet.local.plan import Kind, StackOptions
from flowfleet.local.pools import Pool
from flowfleet.local.stack import StackError
from flowfleet.redis import server
from flowfleet.slurm.allocation import Allocation, Node, read_allocation
from flowfleet.slurm.plan import num_ports, place_on_nodes, plan_fleet
from flowfleet.slurm.steps import by_node


def allocation(gpus: int, nodes: int = 2) -> Allocation:
    made = (Node(name=f"n{index}", address=f"10.0.0.{index}", gpus=gpus, cpus=8) for index in range(nodes))
    return Allocation(job_id="7", nodes=tuple(made))


def options(folder: Path, **given: object) -> StackOptions:
    return StackOptions(**{"state_dir": folder, "port": 0, **given})  # type: ignore[arg-type]


def test_rollouts_take_the_last_accelerators_and_trainers_the_others(tmp_path: Path) -> None:
    placed = place_on_nodes(options(tmp_path, pools=(Pool(replicas=3),)), allocation(4))
    assert placed.rollouts == ("n1:3", "n1:2", "n1:1")
    assert placed.trainer == ("n0:0", "n0:1", "n0:2", "n0:3", "n1:0")
    assert by_node(placed.trainer) == {"n0": (0, 1, 2, 3), "n1": (0,)}


def test_every_node_has_places_without_accelerators(tmp_path: Path) -> None:
    placed = place_on_nodes(options(tmp_path, trainers=2), allocation(0))
    assert placed.trainer == ("n0:0", "n0:1", "n1:0", "n1:1")
    assert placed.rollouts == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pools": (Pool(replicas=4),)}, "fewer --rollouts"),
        ({"pools": (Pool(replicas=1, sequence_parallel_size=3),)}, "over two nodes"),
        ({"rewards": ("ocr:devices=2",)}, "which the job does not have"),
    ],
    ids=["none left", "two nodes", "no such accelerator"],
)
def test_what_cannot_be_placed_is_said(tmp_path: Path, given: dict[str, object], words: str) -> None:
    with pytest.raises(StackError, match=words):
        place_on_nodes(options(tmp_path, **given), allocation(2))


def test_the_plan_speaks_tls_at_the_nodes_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "find_tls_server", lambda: Path("/usr/bin/redis-server"))
    monkeypatch.setattr(server, "server_version", lambda _: (7, 0))
    asked, given = options(tmp_path / "fleet", pools=(Pool(replicas=1),)), allocation(2)
    ports = list(range(20_000, 20_000 + num_ports(asked)))
    plan = plan_fleet(asked, given, ports, tmp_path / "redis")
    by_kind = {process.kind: process for process in plan.processes}
    assert plan.url == f"https://10.0.0.0:{ports[1]}"
    assert plan.redis_url.startswith("rediss://default:") or plan.redis_url.startswith("rediss://:")
    assert f"@10.0.0.0:{ports[0]}/0" in plan.redis_url
    rollout = by_kind[Kind.ROLLOUT]
    assert rollout.argv[:2] == ("srun", "--overlap")
    assert "--nodelist=n1" in rollout.argv
    assert rollout.address.startswith("10.0.0.1:")
    assert not [value for value in (*rollout.argv, *rollout.env.values()) if "redis" in value]
    step = json.loads((tmp_path / "fleet" / "steps" / "rollout-0" / "step.json").read_text())
    assert step["env"]["FLOWFLEET_REDIS_URL"].startswith("rediss://rollout:")
    assert step["env"]["FLOWFLEET_TLS_DIR"].endswith("/tls/rollout")
    assert step["nodes"]["n1"]["devices"] == [1]
    assert "10.0.0.1" in step["nodes"]["n1"]["argv"]
    controller = by_kind[Kind.CONTROLLER]
    assert f"ocr={by_kind[Kind.REWARD].address}" in controller.argv
    assert not [word for process in plan.processes for word in process.argv if "127.0.0.1" in word]
    assert read_allocation(tmp_path / "fleet" / "allocation.json").trainer_devices == ("n0:0", "n0:1", "n1:0")
    config = (tmp_path / "redis" / "redis.conf").read_text()
    assert "bind 10.0.0.0" in config
    assert config.rindex("port 0\n") < config.rindex(f"tls-port {ports[0]}")
