from __future__ import annotations

import pytest

from flowfleet.job.spec import parse_job
from services.controller.job.machine import log_prob_gap
from services.controller.job.machine.events import Trained


@pytest.mark.parametrize(
    ("rollout", "trainer", "advised"),
    [("none", "none", ""), ("fp8", "none", "none"), ("none", "fp8", "fp8"), ("fp8", "fp8", "")],
)
def test_a_gap_is_never_made_wider_by_what_is_advised(rollout: str, trainer: str, advised: str) -> None:
    spec = parse_job(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rewards": {"ocr": {}},
            "rollout": {"quantization": rollout, "max_log_prob_gap": 1e-5},
            "trainer": {"mode": "full", "quantization": trainer},
        }
    )
    said = log_prob_gap.reason(spec, Trained(step=3, log_prob_gap=1e-2))
    assert ("rollout.quantization" in said) is bool(advised)
    assert f'rollout.quantization = "{advised}"' in said or not advised
