"""Losses that follow a teacher's steps or a reward's gradient."""

from pydantic import Field

from flowfleet.algorithms.kinds import OBJECTIVES, Kind, register_kind
from flowfleet.algorithms.registry import Loss, register_loss
from flowfleet.algorithms.settings import DistillationSettings, GradientSettings, NoiseLevelSettings, NumNoiseLevels

_DISTILLATION = "flowfleet.algorithms.distillation"
_GRADIENT = "flowfleet.algorithms.reward_gradient"


class ReflSettings(GradientSettings):
    """Settings of ReFL's loss."""

    reward_ceiling: float | None = None
    """ReFL: rewards of at least this train no more; unset: all do."""


class SrpoSettings(NoiseLevelSettings, GradientSettings):
    """Settings of SRPO's loss."""

    num_noise_levels: NumNoiseLevels = 1
    align_step: float = Field(default=0.4, gt=0.0, le=1.0)
    """SRPO: how far one step of the policy lowers the noise level: to the one that `sigma_sampling` draws, from at most
    `sigma_high`. The known noise leads the rest of the way to an image."""
    discount_shift: float = Field(default=3.0, gt=0.0)
    """SRPO: how an image counts by the noise level s that the step ends at: d s / (1 + (d - 1) s)."""
    positive_words: tuple[str, ...] = ()
    """SRPO: control words before the prompt, such as "Realistic photo", whose reward is wanted; steps take them in
    turn. None: the reward of the prompt itself."""
    negative_words: tuple[str, ...] = ()
    """SRPO: control words before the prompt whose reward is unwanted; steps take them in turn."""
    relative_weight: float = Field(default=0.0, ge=0.0)
    """SRPO: k of (1 + k) times the wanted reward minus the unwanted one."""


register_kind(
    Kind(
        "distillation",
        DistillationSettings,
        f"{OBJECTIVES}.distillation:DistillationObjective",
        "steps",
        reads_rewards=False,
    )
)
register_kind(
    Kind("gradient", GradientSettings, f"{OBJECTIVES}.gradient:GradientObjective", "final", follows_gradients=True)
)

for _loss in (
    Loss("diffusion_opd", f"{_DISTILLATION}:diffusion_opd", "distillation", settings=DistillationSettings),
    Loss(
        "refl",
        f"{_GRADIENT}:refl",
        "gradient",
        settings=ReflSettings,
        defaults={
            "rollout.noise.eta": 0.0,
            "rollout.noise.share_initial_noise": False,
            "rollout.window.strategy": "random",
            "rollout.window.size": 1,
        },
        from_steps=True,
    ),
    Loss("srpo", f"{_GRADIENT}:srpo", "gradient", settings=SrpoSettings),
):
    register_loss(_loss)
