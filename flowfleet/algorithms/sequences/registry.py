"""Losses and algorithms of policies that write tokens. Free of torch; importing it registers them."""

from __future__ import annotations

from typing import Any

from flowfleet.algorithms.registry import Algorithm, Loss, register_algorithm, register_loss

_SEQUENCES = "flowfleet.algorithms.sequences.losses"
_READS = ("clip_range", "clip_range_low", "overlong_share")
_BY_TOKEN = (*_READS, "aggregation")
_COMMON: dict[str, Any] = {"advantage_std": "group", "advantage_clamp": None, "trainer.updates_per_step": 2}

for _loss in (
    Loss(
        "gspo",
        f"{_SEQUENCES}:gspo",
        "sequence",
        reads=_READS,
        defaults={"clip_range": 4e-4, "clip_range_low": 3e-4, "algorithm.correction.level": "sequence", **_COMMON},
        by_sequence=True,
    ),
    Loss(
        "grpo",
        f"{_SEQUENCES}:grpo",
        "sequence",
        reads=_BY_TOKEN,
        defaults={"clip_range": 0.2, "kl_coef": 0.04, **_COMMON},
    ),
):
    register_loss(_loss)

for _algorithm in (
    Algorithm(
        "gspo",
        "GSPO",
        "https://arxiv.org/abs/2507.18071",
        "PPO's clipped surrogate on the ratio of whole sequences, per token.",
        loss="gspo",
    ),
    Algorithm(
        "grpo",
        "GRPO",
        "https://arxiv.org/abs/2402.03300",
        "PPO's clipped surrogate on the ratio of each token, with advantages relative to a group.",
        loss="grpo",
    ),
    Algorithm(
        "dapo",
        "DAPO",
        "https://arxiv.org/abs/2503.14476",
        "GRPO that clips less above, averages over tokens, and costs sequences that come near the limit.",
        loss="grpo",
        defaults={
            "algorithm.kl_coef": 0.0,
            "algorithm.clip_range": 0.28,
            "algorithm.clip_range_low": 0.2,
            "algorithm.aggregation": "token",
            "algorithm.overlong_share": 0.2,
        },
    ),
):
    register_algorithm(_algorithm)
