"""Fleet and jobs over time, looked at by hand: every number follows from the looks."""

from __future__ import annotations

from dataclasses import replace

from flowfleet.api.fleet import Health
from flowfleet.job.spec import JobSpec, parse_job
from services.controller.fleet.replicas import Replica
from services.controller.job.machine import events as ev
from services.controller.job.machine.state_machine import Machine
from services.controller.metrics.families import DESCRIPTIONS, families
from services.controller.metrics.totals import FORGET_S, LAST_S, Totals

SERVING = Replica("r0", "h:1", health=Health.SERVING, job_id="a", version=0)


def spec(pool: str = "default", **schedule: int) -> JobSpec:
    return parse_job(
        {
            "model": {"path": "m"},
            "rewards": {"ocr": {}},
            "data": {"train": "t.txt"},
            "trainer": {"world_size": 2},
            "rollout": {"prompts_per_step": 2, "group_size": 2, "batch_size": 4, "pool": pool},
            "schedule": {"steps": 3, **schedule},
        }
    )


def running(pool: str = "default", **schedule: int) -> Machine:
    """A job whose first weights are published, at time 10."""
    machine = Machine(spec(pool, **schedule))
    machine.apply(ev.TrainerReady(at=10.0, version=0))
    machine.apply(ev.Published(at=10.0, version=0))
    return machine


def sampled(machine: Machine, group: int, index: int) -> None:
    machine.apply(ev.Sampled(at=11.0, step=0, group=group, index=index, version=0))


def shown(totals: Totals) -> dict[tuple[str, ...], float]:
    return {(name, *labels): value for name, labels, value in totals.samples()}


def test_replicas_are_counted_by_pool_and_health_and_never_vanish_from_a_pool_with_a_job() -> None:
    totals = Totals()
    fleet = [SERVING, replace(SERVING, replica_id="r1", health=Health.LOST), replace(SERVING, pool="wide")]
    totals.look({}, fleet, at=0.0, elapsed_s=0.0)
    found = shown(totals)
    assert found["flowfleet_fleet_replicas", "default", "serving"] == 1
    assert found["flowfleet_fleet_replicas", "default", "lost"] == 1
    assert found["flowfleet_fleet_replicas", "default", "idle"] == 0
    assert found["flowfleet_fleet_replicas", "wide", "serving"] == 1
    totals.look({"a": Machine(spec("from-zero"))}, [], at=1.0, elapsed_s=1.0)
    assert shown(totals)["flowfleet_fleet_replicas", "from-zero", "serving"] == 0


def test_utilization_is_the_share_of_live_replica_seconds_with_something_to_make() -> None:
    totals = Totals()
    busy = replace(SERVING, outstanding=4)
    idle = replace(SERVING, replica_id="r1")
    gone = replace(busy, replica_id="r2", health=Health.LOST)
    totals.look({}, [busy, idle, gone], at=2.0, elapsed_s=2.0)
    totals.look({}, [idle], at=5.0, elapsed_s=3.0)
    found = shown(totals)
    assert found["flowfleet_fleet_busy_seconds_total", "default"] == 2.0
    assert found["flowfleet_fleet_replica_seconds_total", "default"] == 2 * 2.0 + 3.0
    assert found["flowfleet_fleet_outstanding_samples", "default"] == 0


def test_a_pool_that_no_job_runs_in_is_forgotten_an_hour_after_its_last_replica_left() -> None:
    totals = Totals()
    jobs = {"a": running()}
    invented = [replace(SERVING, replica_id=f"r{number}", pool=f"invented-{number}") for number in range(3)]
    totals.look(jobs, [SERVING, *invented], at=0.0, elapsed_s=0.0)
    totals.look(jobs, invented[:1], at=1.0, elapsed_s=FORGET_S / 2)
    totals.look(jobs, [], at=2.0, elapsed_s=FORGET_S / 2)
    pools = [labels[0] for name, *labels in shown(totals) if name == "flowfleet_fleet_replica_seconds_total"]
    assert pools == ["default", "invented-0"]
    totals.look(jobs, [], at=3.0, elapsed_s=FORGET_S / 2)
    assert not [key for key in shown(totals) if "invented-0" in key]
    totals.look(jobs, invented[:1], at=4.0, elapsed_s=2.0)
    assert shown(totals)["flowfleet_fleet_replica_seconds_total", "invented-0"] == 2.0


def test_versions_that_replicas_are_behind() -> None:
    machine = running()
    machine.state.published = machine.state.version = 4
    fleet = [
        replace(SERVING, replica_id="r0", version=4),
        replace(SERVING, replica_id="r1", version=3),
        replace(SERVING, replica_id="r2", version=0),
        replace(SERVING, replica_id="r3", version=None, health=Health.UPDATING),
        replace(SERVING, replica_id="r4", job_id="another", version=4),
        replace(SERVING, replica_id="r5", health=Health.LOST),
    ]
    totals = Totals()
    totals.look({"a": machine}, fleet, at=0.0, elapsed_s=0.0)
    found = shown(totals)
    name = "flowfleet_fleet_replicas_at_version"
    lags = {lag: found[name, "default", "a", lag] for lag in ("0", "1", "2", "3+", "none")}
    assert lags == {"0": 1, "1": 1, "2": 0, "3+": 1, "none": 2}
    assert found["flowfleet_fleet_replicas_behind", "default", "a"] == 3  # r1, r2, r4; r3 is on its way


def test_samples_wait_until_a_replica_was_asked_for_them() -> None:
    machine, totals = running(), Totals()
    totals.look({"a": machine}, [SERVING], at=0.0, elapsed_s=0.0)
    assert shown(totals)["flowfleet_job_waiting_samples", "a", "default"] == 4
    totals.look({"a": machine}, [replace(SERVING, outstanding=3)], at=0.0, elapsed_s=0.0)
    assert shown(totals)["flowfleet_job_waiting_samples", "a", "default"] == 1
    sampled(machine, 0, 0)
    totals.look({"a": machine}, [], at=0.0, elapsed_s=0.0)
    assert shown(totals)["flowfleet_job_waiting_samples", "a", "default"] == 3
    machine.apply(ev.PauseRequested(at=12.0))
    totals.look({"a": machine}, [], at=0.0, elapsed_s=0.0)
    assert shown(totals)["flowfleet_job_waiting_samples", "a", "default"] == 0


def test_steps_that_may_not_be_sampled_yet_do_not_wait() -> None:
    machine, totals = running(max_staleness=1), Totals()
    machine.state.published = -1  # a trainer came back: its version goes out first
    totals.look({"a": machine}, [], at=0.0, elapsed_s=0.0)
    assert shown(totals)["flowfleet_job_waiting_samples", "a", "default"] == 4  # of step 0, not of step 1


def test_progress_is_when_something_last_came() -> None:
    machine, totals = running(), Totals()
    for at in (100.0, 101.0):
        totals.look({"a": machine}, [], at=at, elapsed_s=1.0)
    name = "flowfleet_job_last_progress_timestamp_seconds"
    assert shown(totals)[name, "a"] == 100.0
    sampled(machine, 0, 0)
    for at in (102.0, 103.0):
        totals.look({"a": machine}, [], at=at, elapsed_s=1.0)
    assert shown(totals)[name, "a"] == 102.0


def test_accelerators_are_paid_for_while_they_are_held() -> None:
    machine, totals = running(), Totals()
    two_of_one = [replace(SERVING, device_id="gpu"), replace(SERVING, replica_id="r1", device_id="gpu")]
    four = replace(SERVING, replica_id="r3", num_devices=4)
    other = replace(SERVING, replica_id="r2", job_id="another")
    totals.look({"a": machine}, [*two_of_one, four, other], at=0.0, elapsed_s=5.0)
    machine.apply(ev.TrainerLost(at=12.0))
    totals.look({"a": machine}, [SERVING], at=0.0, elapsed_s=3.0)
    found = shown(totals)
    assert found["flowfleet_job_accelerator_seconds_total", "a", "trainer"] == 2 * 5.0
    assert found["flowfleet_job_accelerator_seconds_total", "a", "rollout"] == (1 + 4) * 5.0 + 3.0


def test_held_steps_go_with_the_checkpoint_that_covers_them() -> None:
    machine, totals = running(), Totals()
    totals.look({"a": machine}, [], at=15.0, elapsed_s=0.0)
    batch = machine.state.batches.pop(0)
    machine.state.batches[1] = batch.model_copy(update={"step": 1, "opened_at": 14.0})
    totals.look({"a": machine}, [], at=16.0, elapsed_s=0.0)
    assert shown(totals)["flowfleet_job_held_steps", "a"] == 2
    assert shown(totals)["flowfleet_job_oldest_held_step_age_seconds", "a"] == 16.0 - 10.0
    totals.release_before("a", 1)
    assert shown(totals)["flowfleet_job_held_steps", "a"] == 1
    assert shown(totals)["flowfleet_job_oldest_held_step_age_seconds", "a"] == 16.0 - 14.0


def test_an_ended_job_keeps_its_counters_for_a_while_and_while_no_other_runs_in_its_pool() -> None:
    totals, first, second, elsewhere = Totals(), running(), running(), running("wide")
    first.state.samples_trained, first.state.samples_dropped = 12, {"stale": 2}
    totals.look({"a": first, "c": elsewhere}, [], at=0.0, elapsed_s=1.0)
    assert shown(totals)["flowfleet_job_status", "a", "running"] == 1
    assert totals.active == ["a", "c"]
    totals.look({"c": elsewhere}, [], at=LAST_S + 1.0, elapsed_s=1.0)
    found = shown(totals)
    assert found["flowfleet_job_samples_trained_total", "a"] == 12
    assert found["flowfleet_job_samples_dropped_total", "a", "stale"] == 2
    assert ("flowfleet_job_status", "a", "running") not in found
    assert ("flowfleet_job_last_progress_timestamp_seconds", "a") not in found
    totals.look({"b": second, "c": elsewhere}, [], at=LAST_S + 2.0, elapsed_s=1.0)
    assert not [key for key in shown(totals) if "a" in key[1:]]
    assert totals.active == ["b", "c"]
    totals.look({"c": elsewhere, "d": running()}, [], at=LAST_S + 3.0, elapsed_s=1.0)
    assert shown(totals)["flowfleet_job_samples_trained_total", "b"] == 0  # Prometheus has yet to read its end


def test_jobs_of_a_pool_are_counted_side_by_side() -> None:
    """b has the turn at r1, and a's weights are still on r0; nothing is counted twice, and neither job is behind."""
    totals, jobs = Totals(), {"a": running(), "b": running()}
    fleet = [
        replace(SERVING, outstanding=1),
        replace(SERVING, replica_id="r1", job_id="b", outstanding=3),
        replace(SERVING, replica_id="r2", job_id="", version=None, health=Health.IDLE),
    ]
    for machine in jobs.values():
        machine.state.trainer_version = 0
    totals.look(jobs, fleet, at=0.0, elapsed_s=2.0)
    found = shown(totals)
    assert totals.active == ["a", "b"]
    assert found["flowfleet_fleet_replicas", "default", "serving"] == 2
    assert found["flowfleet_fleet_outstanding_samples", "default"] == 4
    assert [found["flowfleet_job_waiting_samples", job, "default"] for job in jobs] == [3, 1]
    for component, seconds in (("rollout", 2.0), ("trainer", 2 * 2.0)):
        assert [found["flowfleet_job_accelerator_seconds_total", job, component] for job in jobs] == [seconds] * 2
    lags = "flowfleet_fleet_replicas_at_version"
    assert [found[lags, "default", job, "0"] for job in jobs] == [1, 1]
    assert [found[lags, "default", job, "none"] for job in jobs] == [1, 1]  # r2, of which boards take the maximum
    jobs["a"].apply(ev.PauseRequested(at=12.0))
    totals.look(jobs, fleet[:1], at=1.0, elapsed_s=1.0)
    assert shown(totals)["flowfleet_fleet_replicas_behind", "default", "b"] == 1  # a holds no replica any more


def test_limits_of_the_job_are_shown_for_the_rules() -> None:
    machine, totals = running(max_staleness=2), Totals()
    machine.spec = machine.spec.model_copy(
        update={"rollout": machine.spec.rollout.model_copy(update={"max_log_prob_gap": 0.5})}
    )
    totals.look({"a": machine}, [], at=0.0, elapsed_s=0.0)
    assert shown(totals)["flowfleet_job_staleness_limit", "a"] == 2
    assert shown(totals)["flowfleet_job_log_prob_gap_limit", "a"] == 0.5


def test_every_series_is_described_with_its_labels() -> None:
    totals = Totals()
    totals.look({"a": running()}, [SERVING], at=0.0, elapsed_s=0.0)
    for family in families(totals.samples()):
        for sample in family.samples:
            assert tuple(sample.labels) == DESCRIPTIONS[sample.name].labels


def test_seconds_of_accelerators_are_given_once() -> None:
    totals, machine = Totals(), running()
    machine.state.trainer_version = 0
    totals.look({"a": machine}, [SERVING], at=0.0, elapsed_s=2.0)
    ranks = machine.spec.trainer.world_size
    assert totals.new_seconds()["a"]["trainer"] == 2.0 * ranks
    assert totals.new_seconds() == {}
    totals.look({"a": machine}, [SERVING], at=1.0, elapsed_s=1.5)
    assert totals.new_seconds()["a"]["trainer"] == 1.5 * ranks
