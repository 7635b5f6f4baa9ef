"""Reverse steps, and the losses on the log-probs of noisy steps."""

from flowfleet.algorithms.kinds import OBJECTIVES, Kind, register_kind
from flowfleet.algorithms.registry import Loss, Step, register_loss, register_step
from flowfleet.algorithms.settings import AdvantageClamp, ClipRange, NatsSettings, PolicySettings, TrustRegionSettings

_SDE = "flowfleet.algorithms.sde"
_LOSSES = "flowfleet.algorithms.losses"
TWO_UPDATES = {"trainer.updates_per_step": 2}
"""Losses with limits want two updates: in a step's only update the ratio to the old policy is 1 and no limit acts."""


class FlowGrpoSettings(NatsSettings, PolicySettings):
    """Settings of Flow-GRPO's loss."""


class GrpoGuardSettings(NatsSettings, PolicySettings):
    """Settings of GRPO-Guard's loss."""

    clip_range: ClipRange = 2e-6


class FlowDppoSettings(TrustRegionSettings, PolicySettings):
    """Settings of Flow-DPPO's loss."""

    advantage_clamp: AdvantageClamp = None


for _step in (
    Step("sde", f"{_SDE}:sde_scales"),
    Step("cps", f"{_SDE}:cps_scales", is_gaussian=False, max_eta=1.0, noise_at_end=False),
    Step("dance_sde", f"{_SDE}:dance_sde_scales"),
):
    register_step(_step)

register_kind(Kind("policy", PolicySettings, f"{OBJECTIVES}.policy:PolicyObjective", "steps", has_ratio=True))

for _loss in (
    Loss("flow_grpo", f"{_LOSSES}:flow_grpo", "policy", settings=FlowGrpoSettings, defaults=TWO_UPDATES),
    Loss(
        "grpo_guard",
        f"{_LOSSES}:grpo_guard",
        "policy",
        settings=GrpoGuardSettings,
        defaults=TWO_UPDATES,
        needs_old_mean=True,
        needs_gaussian=True,
    ),
    Loss(
        "flow_dppo",
        f"{_LOSSES}:flow_dppo",
        "policy",
        settings=FlowDppoSettings,
        defaults=TWO_UPDATES,
        needs_old_mean=True,
    ),
):
    register_loss(_loss)
