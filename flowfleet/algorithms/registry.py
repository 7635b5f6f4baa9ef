"""Which algorithms, reverse steps and losses there are, and what goes with what. Free of torch, for the controller.

An algorithm is a name for a combination: a reverse step, a window, a loss and an advantage, each of which a job may
still choose itself. A step is a formula that rollout and trainer evaluate, a loss a function that the trainer calls. A
new one is that function and one `register_step` or `register_loss`, a new algorithm one `register_algorithm`, here or
in a plugin (flowfleet/plugins.py). docs/extending.md shows each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LossKind = Literal["policy", "matching", "distillation", "sequence", "gradient"]


@dataclass(frozen=True, slots=True)
class Step:
    """A reverse step with noise, and what it allows."""

    name: str
    formula: str
    """"module:function", a `StepFormula` of flowfleet/algorithms/sde.py."""
    is_gaussian: bool = True
    """Its log-prob is that of the Gaussian it draws from; if not, the bare squared distance to the mean."""
    max_eta: float | None = None
    """The greatest noise level that has a meaning; None: any."""
    noise_at_end: bool = True
    """Adds noise even in the step that ends at sigma 0."""

    def load(self) -> Callable[..., Any]:
        """Imports the formula; needs torch."""
        return _imported(self.formula)


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, and what it needs of the rest."""

    name: str
    function: str
    """"module:function", a `PolicyLoss` of flowfleet/algorithms/losses.py, a `MatchingLoss` of
    matching/losses.py, a `DistillationLoss` of distillation.py, a `SequenceLoss` of sequences/losses.py or a
    `GradientLoss` of reward_gradient.py."""
    kind: LossKind
    """policy: on the log-probs of stored noisy steps. matching: on velocities at new noise over the final latents.
    distillation: on the means of stored noisy steps, compared with a teacher's. sequence: on the log-probs of written
    tokens, for models that write text. gradient: on the gradient of a reward by the pixels of a predicted image."""
    reads: tuple[str, ...] = ()
    """Settings of `algorithm` that only some losses read, and this one does."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings to values that suit this loss better than the schema's defaults: of `algorithm` by their names, of other
    parts of the job by their dotted ones."""
    at_most: Mapping[str, float] = field(default_factory=dict)
    """Settings of `algorithm` to the greatest value that makes sense for this loss."""
    needs_old_mean: bool = False
    """Reads the old policy's means, which rollouts do not store."""
    needs_gaussian: bool = False
    """Its formula holds for Gaussian log-probs alone, so not with `cps`."""
    by_sequence: bool = False
    """Has one ratio for all tokens of a sequence."""
    needs_pairs: bool = False
    """Trains on pairs of a better and a worse sample, by one noise each."""
    needs_groups: bool = False
    """Compares the samples of a group: each micro-batch holds whole groups."""
    shares_noise: bool = False
    """Trains the samples of a group at one noise level by one noise."""
    needs_reference: bool = False
    """Compares with the model before training."""
    takes_kl: bool = True
    """Reads `algorithm.kl_coef`."""
    from_steps: bool = False
    """Begins at the latents before a denoising step of each sample, not at its final ones; for kind gradient."""
    keeps_old_policy: bool = False
    """Compares with an old policy, which follows the trained one by `algorithm.old_policy` and usually samples."""

    @property
    def settings(self) -> dict[str, Any]:
        """`defaults` by dotted names."""
        return {name if "." in name else f"algorithm.{name}": value for name, value in self.defaults.items()}

    @property
    def reads_log_probs(self) -> bool:
        """Whether it has a ratio to the policy that sampled, so that a sampler of other numerics (float8, a merged
        adapter, another engine) needs a correction. All others take samples of any sampler as they are."""
        return self.kind in ("policy", "sequence")

    @property
    def reads_rewards(self) -> bool:
        """Whether a sample counts by its rewards. A teacher needs none."""
        return self.kind != "distillation"

    def load(self) -> Callable[..., Any]:
        """Imports the function; needs torch."""
        return _imported(self.function)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A named combination."""

    name: str
    title: str
    """Name that its authors use."""
    paper: str
    """URL."""
    summary: str
    """One sentence."""
    loss: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Dotted settings of a job to the values that this algorithm gives them where the job does not."""
    data: Literal["prompts", "preferences"] = "prompts"
    """What `data.train` holds: prompts to sample, or pairs of finished media that are only encoded."""


STEPS: dict[str, Step] = {}
LOSSES: dict[str, Loss] = {}
ALGORITHMS: dict[str, Algorithm] = {}


def register_step(step: Step) -> None:
    """Raises ValueError for a name that is taken."""
    if step.name in STEPS:
        raise ValueError(f"a step named {step.name} is registered already")
    STEPS[step.name] = step


def register_loss(loss: Loss) -> None:
    """Raises ValueError for a name that is taken."""
    if loss.name in LOSSES:
        raise ValueError(f"a loss named {loss.name} is registered already")
    LOSSES[loss.name] = loss


def register_algorithm(algorithm: Algorithm) -> None:
    """Raises ValueError for a name that is taken, or a loss that is not there."""
    if algorithm.name in ALGORITHMS:
        raise ValueError(f"an algorithm named {algorithm.name} is registered already")
    if algorithm.loss not in LOSSES:
        raise ValueError(f"algorithm {algorithm.name} names the loss {algorithm.loss}: register that first")
    ALGORITHMS[algorithm.name] = algorithm


def _imported(path: str) -> Callable[..., Any]:
    """What "module:function" names."""
    module, name = path.split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


_SDE = "flowfleet.algorithms.sde"
_LOSSES = "flowfleet.algorithms.losses"
_MATCHING = "flowfleet.algorithms.matching.losses"
_LIKELIHOOD = "flowfleet.algorithms.matching.likelihood"
_GROUPS = "flowfleet.algorithms.matching.groups"
_DISTILLATION = "flowfleet.algorithms.distillation"
_GRADIENT = "flowfleet.algorithms.reward_gradient"

for _step in (
    Step("sde", f"{_SDE}:sde_scales"),
    Step("cps", f"{_SDE}:cps_scales", is_gaussian=False, max_eta=1.0, noise_at_end=False),
    Step("dance_sde", f"{_SDE}:dance_sde_scales"),
):
    register_step(_step)

_CLIP = ("clip_range", "clip_range_low", "clip_nats", "clip_nats_low")
_LEVELS = ("num_noise_levels", "sigma_sampling", "sigma_low", "sigma_high")
_TWO_UPDATES = {"trainer.updates_per_step": 2}
"""Losses with limits want two updates: in a step's only update the ratio to the old policy is 1 and no limit acts."""

for _loss in (
    Loss("flow_grpo", f"{_LOSSES}:flow_grpo", "policy", reads=_CLIP, defaults=_TWO_UPDATES),
    Loss(
        "grpo_guard",
        f"{_LOSSES}:grpo_guard",
        "policy",
        reads=_CLIP,
        defaults={"clip_range": 2e-6, **_TWO_UPDATES},
        needs_old_mean=True,
        needs_gaussian=True,
    ),
    Loss(
        "flow_dppo",
        f"{_LOSSES}:flow_dppo",
        "policy",
        reads=("kl_threshold", "kl_threshold_nats"),
        defaults={"advantage_clamp": None, **_TWO_UPDATES},
        needs_old_mean=True,
    ),
    Loss(
        "diffusion_nft",
        f"{_MATCHING}:diffusion_nft",
        "matching",
        reads=("beta", *_LEVELS, "old_policy", "advantage_mode"),
        defaults={"beta": 0.1},
        at_most={"beta": 1.0},
        keeps_old_policy=True,
    ),
    Loss(
        "dpo",
        f"{_MATCHING}:dpo",
        "matching",
        reads=("beta", *_LEVELS, "pairs_per_group"),
        defaults={"beta": 500.0},
        needs_pairs=True,
        needs_reference=True,
        takes_kl=False,
    ),
    Loss(
        "awm",
        f"{_LIKELIHOOD}:awm",
        "matching",
        reads=("likelihood", "clip_range", "clip_range_low", "old_kl_coef", "old_policy", *_LEVELS),
        defaults={"likelihood": "huber", "clip_range": 1.0, "old_kl_coef": 1.0, "algorithm.old_policy.max": 0.3},
        keeps_old_policy=True,
    ),
    Loss(
        "elbo_pg",
        f"{_LIKELIHOOD}:elbo_pg",
        "matching",
        reads=("likelihood", "beta", "proximal", "old_policy", *_LEVELS),
        defaults={"likelihood": "normalized_x0", "beta": 10.0, "advantage_std": "none"},
        keeps_old_policy=True,
    ),
    Loss(
        "dgpo",
        f"{_GROUPS}:dgpo",
        "matching",
        reads=("beta", "clip_range", "clip_range_low", "old_policy", *_LEVELS),
        defaults={"beta": 100.0, "clip_range": 0.01, "advantage_std": "group", "algorithm.old_policy.max": 0.3},
        needs_groups=True,
        shares_noise=True,
        needs_reference=True,
        keeps_old_policy=True,
    ),
    Loss(
        "crd",
        f"{_GROUPS}:crd",
        "matching",
        reads=("likelihood", "beta", "old_policy", *_LEVELS),
        defaults={
            "likelihood": "normalized_velocity",
            "beta": 1.0,
            "kl_coef": 0.1,
            "algorithm.old_policy.samples": False,
            "algorithm.old_policy.rate": 0.005,
            "algorithm.old_policy.max": 0.999,
        },
        needs_groups=True,
        keeps_old_policy=True,
    ),
    Loss("diffusion_opd", f"{_DISTILLATION}:diffusion_opd", "distillation", reads=("teachers",), takes_kl=False),
    Loss(
        "refl",
        f"{_GRADIENT}:refl",
        "gradient",
        reads=("reward_ceiling",),
        defaults={
            "rollout.noise.eta": 0.0,
            "rollout.noise.share_initial_noise": False,
            "rollout.window.strategy": "random",
            "rollout.window.size": 1,
        },
        from_steps=True,
    ),
    Loss(
        "srpo",
        f"{_GRADIENT}:srpo",
        "gradient",
        reads=("align_step", "discount_shift", "positive_words", "negative_words", "relative_weight", *_LEVELS),
        defaults={"num_noise_levels": 1},
    ),
):
    register_loss(_loss)

_ODE = {"rollout.noise.eta": 0.0}

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
        defaults={
            "rollout.window.strategy": "progressive",
            "rollout.window.size": 4,
            "rollout.window.shift_every": 25,
        },
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
    Algorithm(
        "diffusion_nft",
        "DiffusionNFT",
        "https://arxiv.org/abs/2509.16117",
        "Flow matching towards the better samples and away from the worse, by any sampler and without log-probs.",
        loss="diffusion_nft",
        defaults={**_ODE, "trainer.ema.decay": 0.9},
    ),
    Algorithm(
        "awm",
        "AWM",
        "https://arxiv.org/abs/2509.25050",
        "Flow matching weighted by advantages, as the clipped surrogate of PPO.",
        loss="awm",
        defaults={**_ODE, "trainer.ema.decay": 0.99},
    ),
    Algorithm(
        "elbo_pg",
        "ELBO policy gradient",
        "https://arxiv.org/abs/2602.04663",
        "The proximal exact policy gradient of a likelihood that finished samples give.",
        loss="elbo_pg",
        defaults={**_ODE, "trainer.ema.decay": 0.9},
    ),
    Algorithm(
        "dgpo",
        "DGPO",
        "https://arxiv.org/abs/2510.08425",
        "Prefers the better samples of each group to the worse ones, all at one noise.",
        loss="dgpo",
        defaults={**_ODE, "trainer.ema.decay": 0.9},
    ),
    Algorithm(
        "crd",
        "CRD",
        "https://arxiv.org/abs/2603.14128",
        "Makes the model's own reward follow the given one, both centered in their group.",
        loss="crd",
        defaults={**_ODE, "trainer.ema.decay": 0.9},
    ),
    Algorithm(
        "diffusion_opd",
        "DiffusionOPD",
        "https://arxiv.org/abs/2605.15055",
        "Distills one or several teachers into one policy, by each step's KL on its own samples; without a reward.",
        loss="diffusion_opd",
        defaults={"rollout.noise.type": "sde", "rollout.window.strategy": "all"},
    ),
    Algorithm(
        "refl",
        "ReFL",
        "https://arxiv.org/abs/2304.05977",
        "Follows the gradient of a reward through the decoder and one late denoising step.",
        loss="refl",
    ),
    Algorithm(
        "srpo",
        "SRPO",
        "https://arxiv.org/abs/2509.06942",
        "Follows the gradient of a reward at any noise level, by images that known noise was added to.",
        loss="srpo",
        defaults=_ODE,
    ),
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
