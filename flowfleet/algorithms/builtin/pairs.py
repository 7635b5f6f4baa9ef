"""Losses and algorithms on pairs of a better and a worse sample."""

from flowfleet.algorithms.registry import Algorithm, Loss, register_algorithm, register_loss
from flowfleet.algorithms.settings import Beta, PairwiseSettings

_ODE = {"rollout.noise.eta": 0.0}


class DpoSettings(PairwiseSettings):
    """Settings of Diffusion-DPO's loss."""

    beta: Beta = 500.0


register_loss(
    Loss(
        "dpo",
        "flowfleet.algorithms.matching.losses:dpo",
        "matching",
        settings=DpoSettings,
        needs_pairs=True,
        needs_reference=True,
    )
)

for _algorithm in (
    Algorithm(
        "online_dpo",
        "online Diffusion-DPO",
        "https://arxiv.org/abs/2311.12908",
        "Prefers the best to the worst sample of each group.",
        loss="dpo",
        defaults=_ODE,
    ),
    Algorithm(
        "dpo",
        "Diffusion-DPO",
        "https://arxiv.org/abs/2311.12908",
        "Prefers the chosen to the rejected of each pair of a preference data set; nothing is sampled for training.",
        loss="dpo",
        defaults={**_ODE, "rollout.group_size": 2},
        data="preferences",
    ),
):
    register_algorithm(_algorithm)
