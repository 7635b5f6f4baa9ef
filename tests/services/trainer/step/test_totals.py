"""A sample's ratio is exp of its mean change over all rows that trained on it, whatever the batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.step.totals import Totals


@dataclass
class OneRank:
    """Adds what another rank would bring."""

    other: Tensor
    device: Any = "cpu"

    def sum(self, values: Tensor) -> Tensor:
        return values + self.other


def batch(*rows: int, is_padding: bool = False) -> Any:
    return SimpleNamespace(rows=rows, is_padding=is_padding)


def test_ratios_by_sample() -> None:
    other = torch.zeros(2, 4, dtype=torch.float64)
    other[:, 3] = torch.tensor([0.3, 2.0])  # the other rank's sample: two rows that add up to 0.3
    totals = Totals(OneRank(other), num_steps=2, num_samples=4)  # type: ignore[arg-type]
    totals.add_changes(batch(0, 2), torch.tensor([0.1, -0.2], requires_grad=True))
    totals.add_changes(batch(2, 0), torch.tensor([0.4, 0.0]))  # another pass, batched otherwise
    totals.add_changes(batch(1), torch.tensor([500.0]))
    totals.add_changes(batch(1, is_padding=True), torch.tensor([7.0]))
    wanted = [math.exp(0.05), math.exp(20.0), math.exp(0.1), math.exp(0.15)]
    assert totals.sample_ratios() == pytest.approx(wanted, rel=1e-6)


def test_a_loss_without_a_ratio_has_none() -> None:
    assert Totals(OneRank(torch.zeros(2, 3)), 0, 3).sample_ratios() == []  # type: ignore[arg-type]
