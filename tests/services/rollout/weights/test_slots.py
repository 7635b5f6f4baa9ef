"""Which adapters of several jobs are ready, without a network."""

import pytest

from flowfleet.errors import Conflict
from services.rollout.weights.slots import Key, Slots
from services.rollout.weights.state import Phase, WeightState


def key(job_id: str, version: int = 0, *, evaluated: bool = False) -> Key:
    return Key(job_id, version, evaluated, f"digest of {job_id}")


def admit(state: WeightState, one: Key, num_samples: int = 1):  # type: ignore[no-untyped-def]
    return state.admit(one.job_id, one.version, num_samples, evaluated=one.evaluated, digest=one.digest)


def sharing(slots: int, *keys: Key) -> WeightState:
    state = WeightState(slots=slots)
    state.share()
    for one in keys:
        put(state, one)
    return state


def put(state: WeightState, one: Key) -> int:
    slot = state.slots.place()
    assert slot is not None
    state.put(one, slot)
    return slot


def test_each_job_samples_with_its_own_weights_alone() -> None:
    state = sharing(4, key("a"), key("b", 3), key("b", 3, evaluated=True))
    assert (state.name, state.phase) == ("serving", Phase.SHARING)
    slots = {admit(state, one).slot for one in (key("a"), key("b", 3), key("b", 3, evaluated=True))}
    assert len(slots) == 3
    for other in (key("a", 1), key("b"), key("a", evaluated=True), Key("a", 0, False, "another digest")):
        with pytest.raises(Conflict, match="send the request with its adapter"):
            admit(state, other)


def test_a_new_version_leaves_the_samples_of_the_old_one_and_of_others_as_they_are() -> None:
    state = sharing(3, key("a"), key("b"))
    old, other = admit(state, key("a")), admit(state, key("b"))
    assert put(state, key("a", 1)) not in (old.slot, other.slot)
    for ticket in (old, other):
        state.check(ticket)
    assert (state.is_overtaken(old), state.is_overtaken(other)) == (True, False)
    assert not state.is_overtaken(admit(state, key("a", 1)))


def test_the_slot_used_longest_ago_goes_to_new_weights_but_none_that_is_in_use() -> None:
    slots = Slots(2)
    for one in (key("a"), key("b")):
        slots.put(one, slots.place() or 0)
    slots.take(key("a"), 2)
    number = slots.place()
    assert key("b") not in slots
    assert number is not None
    slots.put(key("c"), number)
    slots.take(key("c"), 1)
    assert slots.place() is None
    slots.release(key("a"), 1)
    assert slots.place() is None
    slots.release(key("a"), 1)
    assert slots.place() is not None
    assert slots.ready == [key("c")]


def test_weights_of_one_job_and_of_several_exclude_each_other() -> None:
    state = sharing(2, key("a"))
    ticket = admit(state, key("a"))
    state.bind("pushed")
    assert not state.held
    with pytest.raises(Conflict, match="1 samples still run"):
        state.touch()
    state.release(1, ticket)
    state.start("pushed", 0)
    state.touch()
    state.loaded()
    state.finish("digest")
    assert [str(one) for one in state.held] == ["pushed/0"]
    state.share()
    assert (state.name, state.held) == ("idle", [])
