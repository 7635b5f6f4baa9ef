from typing import Any

import pytest

from flowfleet.local.placement import Placement, place
from flowfleet.local.pools import Pool, parse_pool
from flowfleet.local.stack import StackError


def pool_of(replicas: int, **settings: Any) -> list[Pool]:
    return [Pool(replicas=replicas, **settings)] if replicas else []


@pytest.mark.parametrize(
    ("replicas", "available", "rollouts", "trainer", "warning"),
    [
        (2, "", "", "", None),
        (1, "0 1 2 3", "0", "1 2 3", None),
        (2, "0 1 2 3", "0 1", "2 3", None),
        (0, "0 1", "", "0 1", None),
        (1, "0", "0", "0", "share accelerator 0"),
        (2, "4 5", "4 5", "4 5", "share accelerator 4, 5"),
        (3, "0 1", "0 1 0", "0 1", "share accelerator 0, 1"),
    ],
)
def test_rollouts_take_the_first_and_trainers_the_others(
    replicas: int, available: str, rollouts: str, trainer: str, warning: str | None
) -> None:
    placed = place(pool_of(replicas), available.split())
    assert (placed.rollouts, placed.trainer) == (tuple(rollouts.split()), tuple(trainer.split()))
    assert (placed.warning is None) if warning is None else (warning in (placed.warning or ""))


def test_what_is_given_is_taken_and_the_rest_follows() -> None:
    four = ("0", "1", "2", "3")
    assert place(pool_of(2, devices=("3", "1")), four).trainer == ("0", "2")
    assert place(pool_of(2), four, trainer_devices=("0", "1")).rollouts == ("2", "3")
    assert place(pool_of(1, devices=("7",)), (), ("6",)).rollouts == ("7",)
    assert "2 rollouts share 1 accelerators" in (place(pool_of(2), ("0", "1"), trainer_devices=("0",)).warning or "")


@pytest.mark.parametrize(("available", "trainer"), [("0", None), ("0 1", ("1",))])
def test_a_rollout_gets_the_accelerators_that_share_its_samples_or_none(
    available: str, trainer: tuple[str, ...] | None
) -> None:
    needed = "--sequence-parallel-size 2 needs 2 accelerators per rollout; 1 is left"
    with pytest.raises(StackError, match=needed):
        place(pool_of(1, sequence_parallel_size=2), available.split(), trainer)
    assert place((), available.split(), trainer).rollouts == ()
    assert place(pool_of(1, sequence_parallel_size=2), ()).rollouts == ()


@pytest.mark.parametrize(
    "placed",
    [
        Placement((Pool(devices=("0",)),), ("0",)),
        Placement((Pool(devices=("0",)), Pool(name="a", devices=("0",))), ("1",)),
    ],
    ids=["with the trainer", "rollouts alone"],
)
def test_who_shares_is_told_that_publishing_is_slower(placed: Placement) -> None:
    """The rule is that of `services.trainer.publishing.broadcast.common_backend`: a Gloo group instead of an NCCL
    group."""
    assert "full publish their weights through host memory (Gloo), which is slower" in (placed.warning or "")
    assert "cannot" not in (placed.warning or "")


@pytest.mark.parametrize(
    ("available", "pools", "devices", "trainer"),
    [
        ("0 1 2 3", "a b:replicas=2", [("0",), ("1", "2")], ("3",)),
        ("0 1 2 3", "a b:devices=0", [("1",), ("0",)], ("2", "3")),
        (
            "0 1 2 3 4",
            "a:sequence_parallel_size=2,replicas=2 b",
            [("0", "1", "2", "3"), ("4",)],
            ("0", "1", "2", "3", "4"),
        ),
        ("0", "a b", [("0",), ("0",)], ("0",)),
        ("", "a b", [None, None], ()),
    ],
)
def test_pools_take_devices_in_order_and_share_what_is_left(
    available: str, pools: str, devices: list[tuple[str, ...] | None], trainer: tuple[str, ...]
) -> None:
    asked = [parse_pool(text) for text in pools.split()]
    placed = place(asked, available.split())
    assert [pool.devices for pool in placed.pools] == devices
    assert placed.trainer == trainer
