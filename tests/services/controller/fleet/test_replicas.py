"""The registry of replicas, pure: who may get a prompt, and who is chosen."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from flowfleet.api.fleet import Health
from flowfleet.data.replicas import ReplicaRecord
from flowfleet.proto import rollout_pb2
from services.controller.fleet.replicas import MISSED_ASKS, Fleet, Offer

SERVING = rollout_pb2.ROLLOUT_STATE_SERVING


def record(name: str, **said: Any) -> ReplicaRecord:
    """Record of a replica that serves version 3 of a job."""
    defaults = {"address": f"{name}:1", "incarnation": "1", "model": "", "pool": "default"}
    return ReplicaRecord(name, **{**defaults, "state": "serving", "job_id": "job", "version": 3, **said})


def status(
    job: str = "job", version: int = 3, state: rollout_pb2.RolloutState.ValueType = SERVING
) -> rollout_pb2.RolloutStatus:
    return rollout_pb2.RolloutStatus(state=state, job_id=job, policy_version=version, incarnation="1")


def fleet_of(*names: str) -> Fleet:
    fleet = Fleet()
    fleet.update(record(name) for name in names)
    return fleet


def chosen(fleet: Fleet, low: int = 3, high: int = 3, limit: int = 100, job: str = "job") -> str | None:
    replica = fleet.choose(job, low, high, limit)
    return None if replica is None else replica.replica_id


def test_a_replica_gets_no_prompt_but_for_what_it_serves() -> None:
    fleet = Fleet()
    for said in (
        {"version": 2},
        {"job_id": "other"},
        {"state": "idle"},
        {"state": "updating"},
        {"state": "draining"},
        {"state": "dreaming"},
    ):
        fleet.update([record("a", **said)])
        assert chosen(fleet) is None
    fleet.update([record("a")])
    assert chosen(fleet) == "a"


def test_a_trainers_rank_that_samples_while_it_is_idle_gets_a_batch_at_a_time_and_none_during_an_update() -> None:
    fleet = Fleet()
    fleet.update([record("rank", pool="default.trainer"), record("rollout")])
    fleet.charge("rollout", 16)
    want = ("job", 3, 3, 32, False, "default.trainer")
    assert [r.replica_id for r in [fleet.choose(*want)] if r] == ["rank"]
    fleet.updating["job"] += 1
    assert [r.replica_id for r in [fleet.choose(*want)] if r] == ["rollout"]
    assert chosen(fleet) == "rank"  # of a job that samples on its ranks alone
    fleet.updating.clear()
    fleet.charge("rank", 16)
    assert [r.replica_id for r in [fleet.choose(*want)] if r] == ["rollout"]
    fleet.charge("rollout", 16)
    assert fleet.choose(*want) is None


def test_a_version_of_the_same_number_in_weights_that_the_job_did_not_publish_gets_no_prompt() -> None:
    fleet = Fleet()
    fleet.update([record("a", digest="lost"), record("b", digest="ours")])
    fleet.verified["job"] = lambda version, digest: (version, digest) == (3, "ours")
    assert chosen(fleet) == "b"
    assert [replica.replica_id for replica in fleet.behind("default", "job", 3)] == ["a"]


def test_a_replica_that_serves_evaluated_weights_gets_validation_alone() -> None:
    """Old records and statuses do not say which they serve: those that sample."""
    fleet = Fleet()
    fleet.update([record("a", evaluated=True), record("b")])
    fleet.answered("b", status())
    for evaluated, able, others in ((True, "a", "b"), (False, "b", "a")):
        replica = fleet.choose("job", 3, 3, 100, evaluated)
        assert replica is not None
        assert replica.replica_id == able
        behind = fleet.behind("default", "job", 3, evaluated=evaluated)
        assert [replica.replica_id for replica in behind] == [others]
    said = status()
    said.evaluated = True
    fleet.answered("b", said)
    assert chosen(fleet) is None


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
    fleet.update([record("b", version=4)])
    assert chosen(fleet, 3, 4) == "b"
    assert chosen(fleet, 3, 3) == "a"


def test_a_silent_replica_is_lost_after_some_asks_and_comes_back_when_it_answers() -> None:
    fleet = fleet_of("a")
    fleet.mark_suspect(["a", "unknown"])
    assert [replica.replica_id for replica in fleet.doubted()] == ["a"]
    for _ in range(MISSED_ASKS - 1):
        fleet.missed("a")
    assert chosen(fleet) == "a"
    fleet.missed("a")
    assert chosen(fleet) is None
    assert fleet.live("default") == []
    assert [replica.replica_id for replica in fleet.doubted()] == ["a"]
    fleet.answered("a", status())
    assert chosen(fleet) == "a"
    assert fleet.doubted() == []


def test_a_broken_call_loses_it_at_once_whatever_its_record_says() -> None:
    fleet = fleet_of("a")
    fleet.missed("a", lost=True)
    fleet.update([record("a", version=4, samples_total=7)])
    assert [(replica.health, replica.version) for replica in fleet.all()] == [(Health.LOST, 3)]
    assert chosen(fleet, 3, 4) is None
    fleet.answered("a", status(version=4))
    assert chosen(fleet, 4, 4) == "a"


def test_a_new_process_is_believed_and_owes_what_the_one_before_was_asked_for() -> None:
    fleet = fleet_of("a")
    fleet.charge("a", 10)
    fleet.missed("a", lost=True)
    fleet.update([record("a", incarnation="2", state="idle")])
    (replica,) = fleet.all()
    assert (replica.health, replica.version, replica.outstanding) == (Health.IDLE, None, 10)
    assert fleet.doubted() == []


def test_a_new_address_is_a_new_replica_and_who_left_is_forgotten() -> None:
    fleet = fleet_of("a", "b")
    fleet.charge("a", 10)
    fleet.update([record("a", address="a:2")])
    fleet.keep(["a"])
    assert [(replica.address, replica.outstanding) for replica in fleet.all()] == [("a:2", 0)]
    assert chosen(fleet) == "a"
    fleet.keep([])
    assert (len(fleet), chosen(fleet), fleet.live("default")) == (0, None, [])


def test_behind_is_who_settled_on_something_else() -> None:
    fleet = fleet_of("a", "b", "c", "d")
    fleet.update([record("b", version=2), record("c", state="updating"), record("d", state="idle", job_id="")])
    assert [replica.replica_id for replica in fleet.behind("default", "job", 3)] == ["b", "d"]


def test_a_pool_has_replicas_of_its_own() -> None:
    fleet = fleet_of("a", "b")
    fleet.update([record("b", pool="wide", version=2)])
    assert [replica.replica_id for replica in fleet.live("wide")] == ["b"]
    assert [replica.replica_id for replica in fleet.live("default")] == ["a"]
    assert fleet.behind("default", "job", 3) == []
    assert [replica.replica_id for replica in fleet.behind("wide", "job", 3)] == ["b"]


@pytest.mark.parametrize("said", [{"job_id": "next", "version": 0}, {"state": "updating"}])
def test_the_jobs_that_a_change_matters_to_are_noted(said: dict[str, Any]) -> None:
    fleet = fleet_of("a")
    fleet.touched.clear()
    fleet.update([record("a", **said)])
    assert fleet.touched == {"job", said.get("job_id", "job")}


def test_replicas_that_share_an_accelerator_count_once() -> None:
    fleet = fleet_of("a", "b", "c", "d", "e")
    shared = status()
    shared.device_id = "GPU-1"
    fleet.answered("a", shared)
    fleet.answered("b", shared)
    fleet.update([record("c")])  # on CPUs there is no identity
    fleet.update([record("d", job_id="other")])
    for _ in range(MISSED_ASKS):
        fleet.missed("e")
    assert fleet.num_devices("job", "default") == 2
    assert fleet.num_devices("none", "default") == 0


def test_devices_that_share_samples_all_count() -> None:
    """An older replica does not say how many, which is one. Replicas on one device count once."""
    fleet = fleet_of("a")
    split = rollout_pb2.RolloutStatus(device="cuda:0", device_id="GPU-1", num_devices=4)
    split.MergeFrom(status())
    fleet.answered("a", split)
    fleet.update([record("b", device="cuda:0", device_id="GPU-2", num_devices=2), record("c", device_id="GPU-2")])
    fleet.update([ReplicaRecord.from_json(json.dumps(_without_number(record("d"))))])
    assert fleet.num_devices("job", "default") == 4 + 2 + 1
    assert [replica.device for replica in fleet.all()] == ["cuda:0 ×4", "cuda:0 ×2", "", ""]


def _without_number(one: ReplicaRecord) -> dict[str, Any]:
    return {name: value for name, value in asdict(one).items() if name != "num_devices"}


def offer(version: int = 3) -> Offer:
    adapter = rollout_pb2.Adapter(lora=rollout_pb2.LoraSpec(rank=4))
    return Offer(pool="default", version=version, evaluated=False, digest="d", adapter=adapter)


def test_a_job_that_shares_replicas_is_lent_any_of_its_pool_for_its_newest_adapter() -> None:
    fleet = Fleet()
    fleet.update(
        [
            record("busy", job_id="other", slots=4, held="other/3"),
            record("fresh", state="idle", job_id="", slots=4),
            record("single", job_id="job"),
            record("elsewhere", pool="q", slots=4),
            record("leaving", state="draining", slots=4),
        ]
    )
    fleet.offers["job"] = offer(version=5)
    fleet.charge("busy", 4, "other")
    assert chosen(fleet, 3, 4) is None
    assert fleet.choose("job", 5, 5, 8, evaluated=True) is None
    lent = fleet.choose("job", 4, 5, 8)
    assert lent is not None
    assert (lent.replica_id, lent.version, lent.digest, lent.offer) == ("fresh", 5, "d", fleet.offers["job"])
    fleet.charge("fresh", 8, "job")
    assert chosen(fleet, 5, 5, 8) == "busy"  # samples of others are not the job's
    fleet.charge("busy", 8, "job")
    assert chosen(fleet, 5, 5, 8) is None
    fleet.charge("busy", -8, "job")
    assert chosen(fleet, 5, 5, 8) == "busy"
    fleet.verified["job"] = lambda version, digest: digest == "another"
    assert chosen(fleet, 5, 5, 8) is None


def test_of_equally_loaded_replicas_one_that_has_the_jobs_weights_is_chosen() -> None:
    fleet = Fleet()
    fleet.update([record("a", slots=4, held="other/3"), record("b", slots=4, held="job/4 other/3")])
    fleet.offers["job"] = offer()
    assert chosen(fleet) == "b"
    assert fleet.num_devices("job", "default") == 1


def test_a_pool_shares_replicas_if_all_that_live_can() -> None:
    fleet = Fleet()
    assert not fleet.shares("default")
    fleet.update([record("a", slots=4)])
    assert fleet.shares("default")
    fleet.update([record("b")])
    assert not fleet.shares("default")
    fleet.update([record("b", state="draining")])
    assert fleet.shares("default")


def test_jobs_that_share_a_pool_hear_of_a_replica_that_comes_or_goes() -> None:
    fleet = Fleet()
    fleet.offers["job"] = offer()
    fleet.update([record("a", job_id="other", slots=4)])
    assert "job" in fleet.touched
    fleet.touched.clear()
    fleet.update([record("a", job_id="other", slots=4, samples_total=5)])
    assert "job" not in fleet.touched
    fleet.missed("a", lost=True)
    assert "job" in fleet.touched
