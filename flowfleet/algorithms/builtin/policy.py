"""Reverse steps, and the losses and algorithms on the log-probs of noisy steps."""

from flowfleet.algorithms.kinds import OBJECTIVES, Kind, register_kind
from flowfleet.algorithms.registry import Algorithm, Loss, Step, register_algorithm, register_loss, register_step
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

for _algorithm in (
    Algorithm(
        "flow_grpo",
        "Flow-GRPO",
        "https://arxiv.org/abs/2505.05470",
        "PPO's clipped surrogate on the steps of an SDE with the marginals of the flow.",
        loss="flow_grpo",
        defaults={"rollout.noise.type": "sde", "rollout.window.strategy": "random"},
    ),
    Algorithm(
        "flow_cps",
        "Flow-CPS",
        "https://arxiv.org/abs/2509.05952",
        "Flow-GRPO on steps that never carry more noise than the schedule has.",
        loss="flow_grpo",
        defaults={"rollout.noise.type": "cps", "rollout.noise.eta": 0.8},
    ),
    Algorithm(
        "mix_grpo",
        "MixGRPO",
        "https://arxiv.org/abs/2507.21802",
        "Flow-GRPO in a window of noisy steps that moves from high to low noise during training.",
        loss="flow_grpo",
        defaults={"rollout.window.strategy": "progressive", "rollout.window.size": 4, "rollout.window.shift_every": 25},
    ),
    Algorithm(
        "grpo_guard",
        "GRPO-Guard",
        "https://arxiv.org/abs/2510.22319",
        "Flow-GRPO with ratios that are centered and of equal spread at every noise level.",
        loss="grpo_guard",
        defaults={"algorithm.advantage_std": "group"},  # as in all configurations of its authors
    ),
    Algorithm(
        "flow_dppo",
        "Flow-DPPO",
        "https://arxiv.org/abs/2606.11025",
        "A trust region by the exact divergence of each step in place of clipped ratios.",
        loss="flow_dppo",
    ),
    Algorithm(
        "temp_flow_grpo",
        "TempFlow-GRPO",
        "https://arxiv.org/abs/2508.04324",
        "One noisy step a training step, all samples of a group from one initial noise; a step counts as its noise.",
        loss="flow_grpo",
        defaults={
            "rollout.noise.type": "sde",
            "rollout.noise.share_initial_noise": True,
            "rollout.window.strategy": "random",
            "rollout.window.size": 1,
            "algorithm.step_weights": "noise",
        },
    ),
    Algorithm(
        "dance_grpo",
        "DanceGRPO",
        "https://arxiv.org/abs/2505.07818",
        "GRPO on an SDE of constant noise, all samples of a group from one initial noise.",
        loss="flow_grpo",
        defaults={
            "rollout.noise.type": "dance_sde",
            "rollout.noise.eta": 1.2,
            "rollout.noise.share_initial_noise": True,
            "algorithm.advantage_std": "group",
            "algorithm.clip_range": 1e-4,
        },
    ),
):
    register_algorithm(_algorithm)
