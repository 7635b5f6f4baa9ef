"""Losses on velocities at new noise over finished samples."""

from typing import Literal

from pydantic import Field

from flowfleet.algorithms.kinds import OBJECTIVES, Kind, register_kind
from flowfleet.algorithms.registry import Loss, register_loss
from flowfleet.algorithms.settings import (
    AdvantageStd,
    Beta,
    ClipRange,
    ClipSettings,
    KlCoef,
    Likelihood,
    LikelihoodSettings,
    MatchingSettings,
    OldPolicyPart,
    OldPolicySettings,
)

_MATCHING = "flowfleet.algorithms.matching.losses"
_LIKELIHOOD = "flowfleet.algorithms.matching.likelihood"
_GROUPS = "flowfleet.algorithms.matching.groups"


class NearOldPolicyPart(OldPolicyPart):
    """An old policy that stays near the trained one."""

    max: float = Field(default=0.3, ge=0.0, lt=1.0)
    """Greatest share."""


class SlowOldPolicyPart(OldPolicyPart):
    """An old policy that is only compared with."""

    rate: float = Field(default=0.005, ge=0.0, le=1.0)
    """Growth of the share an update. 1 makes it constant: `max` from the first update after `delay` on."""
    max: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Greatest share."""


class DiffusionNftSettings(OldPolicySettings, MatchingSettings):
    """Settings of DiffusionNFT's loss."""

    beta: Beta = Field(default=0.1, le=1.0)
    advantage_mode: Literal["all", "positive", "negative", "sign", "positive_sign"] = "all"
    """The part of an advantage that is read: all of it; only what is above 0, or below (the rest counts as 0); its sign
    (−1, 0, 1); or 1 where it is above 0 and else 0."""


class AwmSettings(ClipSettings, LikelihoodSettings, OldPolicySettings, MatchingSettings):
    """Settings of AWM's loss."""

    likelihood: Likelihood = "huber"
    clip_range: ClipRange = 1.0
    old_policy: NearOldPolicyPart = NearOldPolicyPart()


class ElboPgSettings(LikelihoodSettings, OldPolicySettings, MatchingSettings):
    """Settings of the ELBO policy gradient."""

    likelihood: Likelihood = "normalized_x0"
    beta: Beta = 10.0
    proximal: bool = True
    """ELBO policy gradient: take the log-ratio to the old policy from the advantage (PEPG), or not (EPG)."""
    advantage_std: AdvantageStd = "none"


class DgpoSettings(ClipSettings, OldPolicySettings, MatchingSettings):
    """Settings of DGPO's loss."""

    beta: Beta = 100.0
    clip_range: ClipRange = 0.01
    advantage_std: AdvantageStd = "group"
    old_policy: NearOldPolicyPart = NearOldPolicyPart()


class CrdSettings(LikelihoodSettings, OldPolicySettings, MatchingSettings):
    """Settings of CRD's loss."""

    likelihood: Likelihood = "normalized_velocity"
    beta: Beta = 1.0
    kl_coef: KlCoef = 0.1
    old_policy: SlowOldPolicyPart = SlowOldPolicyPart()


register_kind(Kind("matching", MatchingSettings, f"{OBJECTIVES}.matching:MatchingObjective", "final"))

for _loss in (
    Loss(
        "diffusion_nft", f"{_MATCHING}:diffusion_nft", "matching", settings=DiffusionNftSettings, keeps_old_policy=True
    ),
    Loss("awm", f"{_LIKELIHOOD}:awm", "matching", settings=AwmSettings, keeps_old_policy=True),
    Loss("elbo_pg", f"{_LIKELIHOOD}:elbo_pg", "matching", settings=ElboPgSettings, keeps_old_policy=True),
    Loss(
        "dgpo",
        f"{_GROUPS}:dgpo",
        "matching",
        settings=DgpoSettings,
        needs_groups=True,
        shares_noise=True,
        needs_reference=True,
        keeps_old_policy=True,
    ),
    Loss(
        "crd",
        f"{_GROUPS}:crd",
        "matching",
        settings=CrdSettings,
        needs_groups=True,
        keeps_old_policy=True,
        old_policy_samples=False,
    ),
):
    register_loss(_loss)
