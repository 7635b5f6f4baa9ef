from __future__ import annotations

import pytest

from flowfleet.redis import keys


def test_keys_of_a_job() -> None:
    assert keys.job_key("j1", "state") == "ff:j1:state"
    assert keys.trajectories("j1") == "ff:j1:trajectories"
    assert keys.dead_trajectories("j1") == "ff:j1:trajectories:dead"
    assert keys.blob("j1", "trajectory", 3, 0, 11) == "ff:j1:blob:trajectory:3:0:11"
    assert keys.blob("j1", "x").startswith(keys.job_key("j1") + ":")


def test_no_job_id_collides_with_the_fleet() -> None:
    for job_id in ("replica", "jobs", "-fleet", "fleet"):
        assert not f"{keys.job_key(job_id)}:".startswith(keys.fleet_key("replica")[:9])
    assert keys.replicas("records") == "ff-fleet:replicas:records"


@pytest.mark.parametrize("part", ["", "a:b", "a b", "a*", "a/b", "a\n", "ä", "[x]"])
def test_a_part_cannot_smuggle_in_another_key_or_a_pattern(part: str) -> None:
    with pytest.raises(ValueError, match="use letters"):
        keys.job_key(part)
    with pytest.raises(ValueError, match="use letters"):
        keys.blob("job", part)
    with pytest.raises(ValueError, match="use letters"):
        keys.replicas(part)


def test_idempotency_keys_may_have_any_characters() -> None:
    assert keys.idempotency("a:b *") != keys.idempotency("a:b  *")
    assert keys.idempotency("x").startswith("ff-fleet:idempotency:")
