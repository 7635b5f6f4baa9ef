"""The loss on pairs of a better and a worse sample."""

from flowfleet.algorithms.registry import Loss, register_loss
from flowfleet.algorithms.settings import Beta, PairwiseSettings


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
