import pytest

from flowfleet.local.placement import Placement, place
from flowfleet.local.stack import StackError


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
    placed = place(replicas, available.split())
    assert (placed.rollouts, placed.trainer) == (tuple(rollouts.split()), tuple(trainer.split()))
    assert (placed.warning is None) if warning is None else (warning in (placed.warning or ""))


def test_what_is_given_is_taken_and_the_rest_follows() -> None:
    four = ("0", "1", "2", "3")
    assert place(2, four, rollout_devices=("3", "1")).trainer == ("0", "2")
    assert place(2, four, trainer_devices=("0", "1")).rollouts == ("2", "3")
    assert place(1, (), ("7",), ("6",)).of_rollout(0) == ("7",)
    assert "2 rollouts share 1 accelerators" in (place(2, ("0", "1"), trainer_devices=("0",)).warning or "")


@pytest.mark.parametrize(("available", "trainer"), [("0", None), ("0 1", ("1",))])
def test_a_rollout_gets_the_accelerators_that_share_its_samples_or_none(
    available: str, trainer: tuple[str, ...] | None
) -> None:
    needed = "--sequence-parallel-size 2 needs 2 accelerators per rollout; 1 is left"
    with pytest.raises(StackError, match=needed):
        place(1, available.split(), None, trainer, 2)
    assert place(0, available.split(), None, trainer, 2).rollouts == ()
    assert place(1, (), each=2).rollouts == ()


@pytest.mark.parametrize(
    "placed", [Placement(("0",), ("0",)), Placement(("0", "0"), ("1",))], ids=["with the trainer", "rollouts alone"]
)
def test_who_shares_is_told_that_publishing_is_slower(placed: Placement) -> None:
    """The rule is that of `services.trainer.publishing.broadcast.common_backend`: a Gloo group instead of an NCCL
    group."""
    assert "full publish their weights through host memory (Gloo), which is slower" in (placed.warning or "")
    assert "cannot" not in (placed.warning or "")
