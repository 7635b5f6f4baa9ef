"""The desk of a job's attached ranks, by a clock of its own."""

from __future__ import annotations

from typing import Any

import pytest

from flowfleet.api.attach import Announcement
from flowfleet.errors import Conflict, Unavailable
from services.controller.platforms.attach.desk import LOST_S, Desk


def rank(number: int, process: str = "", **said: Any) -> Announcement:
    usual = {"world_size": 2, "meets_at": "node-0/29500/run"}
    return Announcement(token="t", version="0", rank=number, process=process or f"p{number}", **{**usual, **said})


def test_a_trainer_serves_once_its_ranks_are_there_and_rank_0_answers() -> None:
    desk = Desk("job", 2, 0, 0.0)
    assert desk.waits_for() == "waits for 2 ranks of attempt 1"
    assert desk.announce(rank(1), {"TOKEN": "x"}, 1.0).secrets == {"TOKEN": "x"}
    assert desk.waits_for() == "waits for 1 rank of attempt 1"
    attempt = desk.announce(rank(0), {"TOKEN": "y"}, 2.0)
    assert (attempt.number, attempt.secrets) == (1, {"TOKEN": "x"})
    assert (desk.serves(), desk.waits_for()) == ("", "waits until rank 0 of attempt 1 serves")
    desk.announce(rank(0, attempt=1, address="h:1"), {}, 3.0)
    assert desk.serves() == "h:1"


def test_other_ranks_are_refused_until_the_first_are_gone() -> None:
    desk = Desk("job", 2, 0, 0.0)
    for number in (0, 1):
        desk.announce(rank(number, address="h:1"), {}, 1.0)
    for other in (rank(0, "another"), rank(0, "another", meets_at="node-1/29500/run")):
        with pytest.raises(Conflict, match="job job has ranks already: attempt 1, with 2 ranks"):
            desk.announce(other, {}, 2.0)
    assert desk.announce(rank(1, attempt=1, left=True, words="no memory"), {}, 3.0).end == "now"
    assert (desk.serves(), desk.words) == ("", "no memory")
    assert desk.waits_for() == "waits until 1 rank of attempt 1 have ended"
    assert desk.announce(rank(0, attempt=1), {}, 4.0).end == "now"
    with pytest.raises(Unavailable, match="attempt 1 of job job is ending"):
        desk.announce(rank(0, "another"), {}, 5.0)
    assert desk.announce(rank(0, "another"), {}, 4.1 + LOST_S).number == 2
    for old in (rank(0, attempt=1), rank(1, attempt=1)):
        with pytest.raises(Conflict, match="attempt 1 of job job is over: this rank must end"):
            desk.announce(old, {}, 5.0 + LOST_S)
    assert desk.words == ""


def test_a_silent_rank_ends_the_attempt() -> None:
    desk = Desk("job", 2, 0, 0.0)
    for number in (0, 1):
        desk.announce(rank(number, address="h:1"), {}, 1.0)
    desk.announce(rank(0, attempt=1), {}, LOST_S)
    desk.look(1.0 + LOST_S)
    assert desk.serves() == "h:1"
    desk.look(1.1 + LOST_S)
    assert desk.serves() == ""
    assert desk.announce(rank(0, attempt=1), {}, 2.0 + LOST_S).end == "now"


def test_after_a_restart_the_ranks_of_before_are_taken_up_first() -> None:
    desk = Desk("job", 2, 3, 100.0)
    with pytest.raises(Unavailable, match="the controller was restarted: it waits for the ranks of a former attempt"):
        desk.announce(rank(0, "another"), {}, 101.0)
    for number in (0, 1):
        desk.announce(rank(number, attempt=3, address="h:1"), {}, 102.0)
    assert desk.serves() == "h:1"
    late = Desk("job", 2, 3, 100.0)
    with pytest.raises(Conflict, match="attempt 3 of job job is over"):
        late.announce(rank(0, attempt=3), {}, 100.0 + LOST_S)
    assert late.announce(rank(0), {}, 101.0 + LOST_S).number == 4


@pytest.mark.parametrize(("number", "size"), [(0, 1), (2, 3)])
def test_a_world_of_another_size_is_refused(number: int, size: int) -> None:
    with pytest.raises(Conflict, match=rf"this is rank {number} of {size}, but job job has trainer.world_size = 2"):
        Desk("job", 2, 0, 0.0).announce(rank(number, world_size=size), {}, 0.0)
