"""The receiver's state machine, without a network."""

import random

import pytest

from flowfleet.errors import Conflict, Unavailable
from services.rollout.weights.state import Phase, WeightState


def serving(job_id: str = "job", version: int = 0) -> WeightState:
    state = WeightState()
    state.bind(job_id)
    update(state, job_id, version)
    return state


def update(state: WeightState, job_id: str, version: int) -> None:
    state.start(job_id, version)
    state.require_updating(job_id, version)
    state.touch()
    state.loaded()
    state.require_loaded(job_id, version)
    state.finish("digest")


def test_a_whole_update_leads_to_serving_exactly_that_version() -> None:
    state = serving(version=3)
    assert (state.phase, state.digest) == (Phase.SERVING, "digest")
    state.admit("job", 3, 5)
    assert state.in_flight == 5
    for job_id, version in (("job", 2), ("job", 4), ("other", 3)):
        with pytest.raises(Conflict, match="serves version 3 of job job"):
            state.admit(job_id, version, 1)


def test_other_weights_of_the_same_version_are_refused() -> None:
    """This happens after Redis loses writes: the lost steps had made a version with the same number."""
    state = serving(version=3)
    state.admit("job", 3, 1, digest="digest")
    with pytest.raises(Conflict, match="with digest digest, not another"):
        state.admit("job", 3, 1, digest="another")


def test_either_kind_of_weights_of_a_version_is_refused_where_the_other_is_served() -> None:
    """Requests and the phases of an update are held apart: an interleaved one of the other kind never finishes."""
    for evaluated in (False, True):
        state = WeightState()
        state.bind("job")
        state.start("job", 3, evaluated=evaluated)
        with pytest.raises(Conflict, match="StartWeightUpdate"):
            state.require_updating("job", 3, evaluated=not evaluated)
        state.touch()
        state.loaded()
        with pytest.raises(Conflict, match="StartWeightUpdate"):
            state.require_loaded("job", 3, evaluated=not evaluated)
        state.finish("digest")
        state.admit("job", 3, 1, evaluated=evaluated)
        with pytest.raises(Conflict, match="evaluated weights"):
            state.admit("job", 3, 1, evaluated=not evaluated)


def test_no_weights_no_prompts() -> None:
    with pytest.raises(Conflict, match="no verified weights"):
        WeightState().admit("job", 0, 1)


def test_starting_an_update_stops_admission_but_keeps_what_runs_valid() -> None:
    state = serving()
    ticket = state.admit("job", 0, 2)
    state.start("job", 1)
    with pytest.raises(Conflict, match="being updated to version 1"):
        state.admit("job", 1, 1)
    state.check(ticket)
    with pytest.raises(Conflict, match="2 samples still run"):
        state.touch()
    state.check(ticket)
    state.release(2)
    state.touch()
    with pytest.raises(Conflict, match="weights changed"):
        state.check(ticket)


@pytest.mark.parametrize("events", [("start",), ("start", "touch"), ("start", "touch", "loaded")])
def test_an_update_that_fails_anywhere_leaves_unknown_weights(events: tuple[str, ...]) -> None:
    state = serving()
    for event in events:
        state.start("job", 1) if event == "start" else getattr(state, event)()
    state.forget()
    assert (state.phase, state.digest) == (Phase.IDLE, "")
    for version in (0, 1):
        with pytest.raises(Conflict):
            state.admit("job", version, 1)
        with pytest.raises(Conflict):
            state.require_updating("job", version)
    update(state, "job", 1)
    state.admit("job", 1, 1)


def test_phases_of_another_update_are_refused() -> None:
    state = serving()
    with pytest.raises(Conflict, match="StartWeightUpdate"):
        state.require_updating("job", 0)
    state.start("job", 1)
    state.start("job", 1)
    with pytest.raises(Conflict, match="UpdateWeights"):
        state.require_loaded("job", 1)
    with pytest.raises(Conflict, match="StartWeightUpdate"):
        state.require_updating("job", 2)
    state.touch()
    state.loaded()
    state.start("job", 2)  # The update to 1 was given up; what it loaded does not count for 2.
    with pytest.raises(Conflict, match="UpdateWeights"):
        state.require_loaded("job", 2)


def test_only_the_bound_job_is_updated() -> None:
    state = WeightState()
    with pytest.raises(Conflict, match="bound to no job"):
        state.start("job", 0)
    state.bind("job")
    with pytest.raises(Conflict, match="bound to job job, not to job other"):
        state.start("other", 0)


def test_draining_refuses_and_keeps_what_runs() -> None:
    state = serving()
    ticket = state.admit("job", 0, 1)
    state.draining = True
    with pytest.raises(Unavailable):
        state.admit("job", 0, 1)
    with pytest.raises(Unavailable):
        state.start("job", 1)
    state.check(ticket)


def test_no_order_of_events_admits_a_version_that_was_not_verified() -> None:
    """Random calls, legal or not. The model: the version verified since weights were last touched or forgotten."""
    assert sum(_admitted(random.Random(seed)) for seed in range(20)) > 100


def _admitted(rng: random.Random) -> int:
    """Runs 3000 random events and counts the admissions."""
    likely = {"bind": 1, "start": 4, "load": 12, "finish": 12, "fail": 1, "admit": 8, "release": 16}
    state = WeightState()
    verified: tuple[str, int] | None = None
    loaded = False
    num_admitted = 0
    for event in rng.choices(list(likely), weights=list(likely.values()), k=3000):
        job_id, version = rng.choice("aaab"), rng.randrange(2)
        try:
            if event == "bind":
                state.bind(job_id)
                verified, loaded = None, False
            elif event == "start":
                state.start(job_id, version)
                verified, loaded = None, False
            elif event == "load":
                state.require_updating(job_id, version)
                state.touch()
                state.loaded()
                loaded = True
            elif event == "finish":
                state.require_loaded(job_id, version)
                assert loaded
                state.finish("digest")
                verified = (job_id, version)
            elif event == "fail":
                state.forget()
                verified, loaded = None, False
            elif event == "admit":
                state.admit(job_id, version, 1)
                assert verified == (job_id, version)
                num_admitted += 1
            elif state.in_flight:
                state.release(1)
        except Conflict:
            assert event != "admit" or verified != (job_id, version)
    return num_admitted
