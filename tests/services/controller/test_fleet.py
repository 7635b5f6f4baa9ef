"""The registry of replicas, pure: who may get a prompt, and who is chosen."""

from __future__ import annotations

from flowfleet.proto import rollout_pb2
from services.controller.fleet import MISSED_POLLS, Announced, Fleet, Health

SERVING = rollout_pb2.ROLLOUT_STATE_SERVING


def status(
    job: str = "job", version: int = 3, state: rollout_pb2.RolloutState.ValueType = SERVING
) -> rollout_pb2.RolloutStatus:
    return rollout_pb2.RolloutStatus(state=state, job_id=job, policy_version=version)


def fleet_of(*names: str) -> Fleet:
    fleet = Fleet()
    fleet.announce({name: Announced(f"{name}:1", "default") for name in names})
    for name in names:
        fleet.answered(name, status())
    return fleet


def chosen(fleet: Fleet, low: int = 3, high: int = 3, limit: int = 100, job: str = "job") -> str | None:
    replica = fleet.choose(job, low, high, limit)
    return None if replica is None else replica.replica_id


def test_an_announced_replica_gets_no_prompt_before_it_shows_its_version() -> None:
    fleet = Fleet()
    fleet.announce({"a": Announced("a:1", "default")})
    assert chosen(fleet) is None
    fleet.answered("a", status(version=2))
    assert chosen(fleet) is None
    fleet.answered("a", status(job="other"))
    assert chosen(fleet) is None
    for state in (
        rollout_pb2.ROLLOUT_STATE_IDLE,
        rollout_pb2.ROLLOUT_STATE_UPDATING,
        rollout_pb2.ROLLOUT_STATE_DRAINING,
    ):
        fleet.answered("a", status(state=state))
        assert chosen(fleet) is None
    fleet.answered("a", status())
    assert chosen(fleet) == "a"


def test_the_least_loaded_is_chosen_and_a_full_one_never() -> None:
    fleet = fleet_of("a", "b")
    fleet.charge("a", 10)
    assert chosen(fleet) == "b"
    fleet.charge("b", 20)
    assert chosen(fleet) == "a"
    assert chosen(fleet, limit=10) is None
    fleet.charge("b", -20)
    assert chosen(fleet, limit=10) == "b"


def test_of_equally_loaded_ones_the_newest_version_is_chosen() -> None:
    fleet = fleet_of("a", "b")
    fleet.answered("b", status(version=4))
    assert chosen(fleet, 3, 4) == "b"
    assert chosen(fleet, 3, 3) == "a"


def test_a_silent_replica_is_lost_after_some_polls_and_comes_back_when_it_answers() -> None:
    fleet = fleet_of("a")
    for _ in range(MISSED_POLLS - 1):
        fleet.missed("a")
    assert chosen(fleet) == "a"
    fleet.missed("a")
    assert chosen(fleet) is None
    assert fleet.live("default") == []
    fleet.answered("a", status())
    assert chosen(fleet) == "a"


def test_a_broken_call_loses_it_at_once() -> None:
    fleet = fleet_of("a")
    fleet.missed("a", lost=True)
    assert [replica.health for replica in fleet.all()] == [Health.LOST]


def test_a_new_address_is_a_new_replica_and_who_left_is_forgotten() -> None:
    fleet = fleet_of("a", "b")
    fleet.announce({"a": Announced("a:2", "default")})
    assert [replica.replica_id for replica in fleet.all()] == ["a"]
    assert chosen(fleet) is None


def test_behind_is_who_settled_on_something_else() -> None:
    fleet = fleet_of("a", "b", "c", "d")
    fleet.answered("b", status(version=2))
    fleet.answered("c", status(state=rollout_pb2.ROLLOUT_STATE_UPDATING))
    fleet.answered("d", status(state=rollout_pb2.ROLLOUT_STATE_IDLE))
    assert [replica.replica_id for replica in fleet.behind("default", "job", 3)] == ["b", "d"]


def test_a_pool_has_replicas_of_its_own() -> None:
    fleet = fleet_of("a", "b")
    fleet.announce({"a": Announced("a:1", "default"), "b": Announced("b:1", "wide")})
    fleet.answered("b", status(version=2))
    assert [replica.replica_id for replica in fleet.live("wide")] == ["b"]
    assert fleet.behind("default", "job", 3) == []
    assert [replica.replica_id for replica in fleet.behind("wide", "job", 3)] == ["b"]


def test_replicas_that_share_an_accelerator_count_once() -> None:
    fleet = fleet_of("a", "b", "c", "d", "e")
    shared = status()
    shared.device_id = "GPU-1"
    fleet.answered("a", shared)
    fleet.answered("b", shared)
    fleet.answered("c", status())  # on CPUs there is no identity
    fleet.answered("d", status(job="other"))
    for _ in range(MISSED_POLLS):
        fleet.missed("e")
    assert fleet.num_devices("job") == 2
    assert fleet.num_devices("none") == 0
