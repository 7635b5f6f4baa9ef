"""Blobs of sequences and prompts: what is written is read, and anything else is DataLoss."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flowfleet.data.sequences import PromptBlob, TokenTrajectory
from flowfleet.data.trajectories import FinalLatents
from flowfleet.errors import DataLoss

ROUTED = torch.arange(4 * 2 * 3, dtype=torch.uint8).reshape(4, 2, 3)


def trajectory(**changes: Any) -> TokenTrajectory:
    usual = TokenTrajectory(
        torch.tensor([5, 7, 1]), torch.tensor([-0.5, -1.0, -2.0]), torch.tensor([True, False, True]), "stop"
    )
    return replace(usual, **changes)


@pytest.mark.parametrize("routed", [None, ROUTED, ROUTED.to(torch.int16)])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_trajectory_is_read_as_it_was_written(routed: torch.Tensor | None, reason: Any) -> None:
    written = trajectory(routed_experts=routed, stop_reason=reason)
    read = TokenTrajectory.from_bytes(written.to_bytes())
    assert read.stop_reason == reason
    for name in ("token_ids", "log_probs", "mask"):
        assert torch.equal(getattr(read, name), getattr(written, name))
    assert (routed is None) == (read.routed_experts is None)
    if routed is not None and read.routed_experts is not None:
        assert torch.equal(read.routed_experts, routed)
        assert read.routed_experts.dtype == routed.dtype


def test_a_prompt_is_read_as_it_was_written() -> None:
    written = PromptBlob(torch.tensor([1, 2, 3]), {"pixel_values": torch.rand(4, 6), "grid": torch.tensor([[1, 2, 2]])})
    read = PromptBlob.of(PromptBlob.from_bytes(written.to_bytes()).encoded())
    assert torch.equal(read.token_ids, written.token_ids)
    assert read.inputs.keys() == written.inputs.keys()
    assert all(torch.equal(read.inputs[name], tensor) for name, tensor in written.inputs.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_probs": torch.zeros(2)}, "log_probs"),
        ({"log_probs": torch.zeros(3, dtype=torch.float64)}, "log_probs"),
        ({"token_ids": torch.tensor([1, -2, 3])}, "ids from 0"),
        ({"mask": torch.zeros(3, dtype=torch.bool)}, "no token"),
        ({"mask": torch.ones(3)}, "mask"),
        ({"stop_reason": "tired"}, "stop_reason"),
        ({"routed_experts": ROUTED[:2]}, "2 rows for 3 tokens"),
        ({"routed_experts": ROUTED.float()}, "uint8 or int16"),
    ],
)
def test_a_trajectory_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trajectory(**changes)


@pytest.mark.parametrize("data", [b"", b"nonsense" * 9, FinalLatents(torch.zeros(2)).to_bytes()])
@pytest.mark.parametrize("kind", [TokenTrajectory, PromptBlob])
def test_other_bytes_are_data_loss(kind: Any, data: bytes) -> None:
    with pytest.raises(DataLoss):
        kind.from_bytes(data)


def test_one_kind_is_never_taken_for_the_other() -> None:
    with pytest.raises(DataLoss, match=r"flowfleet\.tokens\.v1"):
        TokenTrajectory.from_bytes(PromptBlob(torch.tensor([1])).to_bytes())
    with pytest.raises(DataLoss, match=r"flowfleet\.prompt\.v1"):
        PromptBlob.from_bytes(trajectory().to_bytes())
