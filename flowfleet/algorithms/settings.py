"""Settings of losses, as tables that a loss's own model is made of. Free of torch, for the controller and the docs.

A model inherits `LossSettings` and the groups that its kind reads, and declares what the loss alone reads, with its
defaults and bounds. Types such as `ClipRange` carry bounds and description of a setting that several losses read. Code
that serves any loss reads a group by `LossSettings.of`.
"""

from typing import Annotated, Literal, TypeVar

from pydantic import Field

from flowfleet.part import Part

ClipRange = Annotated[
    float,
    Field(
        gt=0.0,
        le=1.0,
        description="Limit on the ratio of mean log-probs per latent element, or of AWM's and DGPO's likelihoods.",
    ),
]
ClipRangeLow = Annotated[
    float | None, Field(gt=0.0, lt=1.0, description="How far the ratio counts below 1; unset: as far as above.")
]
Beta = Annotated[
    float,
    Field(
        gt=0.0,
        description="DiffusionNFT: share of the trained policy in the two that are matched, at most 1. DPO and DGPO: "
        "how close to the reference. ELBO policy gradient: how close to the old policy. CRD: factor of the model's own "
        "reward.",
    ),
]
Likelihood = Annotated[
    Literal["velocity", "normalized_velocity", "x0", "normalized_x0", "huber"],
    Field(
        description="The error at a noise level that stands for minus a log-likelihood: the mean square of the "
        "velocity's or of the predicted x0's, each also over its mean size; or AWM's generalized Huber error."
    ),
]
KlCoef = Annotated[
    float,
    Field(
        ge=0.0,
        description="Weight of the KL (policy losses) or of the squared distance (matching losses) to the model before "
        'training. With `trainer.mode = "full"` this keeps a second copy of the weights.',
    ),
]
AdvantageStd = Annotated[
    Literal["global", "group", "none"],
    Field(description="Divide centered rewards by the std (ddof 0) of the batch, of the group, or not at all."),
]
AdvantageClamp = Annotated[float | None, Field(gt=0.0, description="Advantages are cut to ± this; null leaves them.")]
NumNoiseLevels = Annotated[
    int, Field(ge=1, le=1000, description="Noise levels at which a matching loss trains each sample of a step.")
]

_T = TypeVar("_T", bound=Part)


class LossSettings(Part):
    """`name` fills in what the job leaves out: step, window, loss, advantage (docs/algorithms.md)."""

    name: str = "flow_grpo"
    """Fills in what the job leaves out."""
    loss: str = "flow_grpo"
    """Unset: the algorithm's."""

    def of(self, group: type[_T]) -> _T:
        """The settings of a group as this loss has them; those that it does not read are at the group's defaults."""
        if isinstance(self, group):
            return self
        return group.model_construct(**{name: getattr(self, name) for name in group.model_fields if self.reads(name)})

    @classmethod
    def reads(cls, name: str) -> bool:
        """Returns whether the loss has a setting of this name."""
        return name in cls.model_fields


class CorrectionPart(Part):
    """Correction for samples that another engine or an older policy drew, by the ratio trainer / rollout of a row."""

    mode: Literal["none", "truncated", "band", "rejection"] = "none"
    """none: nothing. truncated: importance weights of at most `high`. band: importance weights, 0 outside low … high.
    rejection: rows outside low … high count for nothing, all others for 1."""
    low: float = Field(default=0.5, gt=0.0, le=1.0)
    """Least ratio of `band` and `rejection`."""
    high: float = Field(default=2.0, ge=1.0)
    """Greatest ratio."""
    level: Literal["step", "sequence"] = "step"
    """Unit with a ratio of its own, a geometric mean: each noisy step of a sample or token of a text, or the sample by
    all of them."""

    @property
    def needs_all_rows(self) -> bool:
        """True where a row's weight depends on other rows, so that all old log-probs come before the first update."""
        return self.mode != "none" and self.level == "sequence"


class OldPolicyPart(Part):
    """The old policy of matching losses. After a training step that brings the job to n optimizer updates it keeps the
    share min(max, rate · (n − delay)) of itself and takes the rest from the trained one; 0 is on-policy."""

    rate: float = Field(default=0.001, ge=0.0, le=1.0)
    """Growth of the share an update. 1 makes it constant: `max` from the first update after `delay` on."""
    max: float = Field(default=0.5, ge=0.0, lt=1.0)
    """Greatest share."""
    delay: int = Field(default=0, ge=0)
    """Updates for which the share stays 0."""


class KlGatePart(Part):
    """GARDO's gate: `kl_coef` counts for the tenth of the samples whose total other rewards doubt most."""

    rewards: tuple[str, ...] = ()
    """Rewards of weight 0 that doubt the total; none: `kl_coef` counts for all samples."""


class KlReferencePart(Part):
    """GARDO's moving reference: what `kl_coef` holds to becomes the trained policy as it is. Unset: it stays the model
    before training."""

    every: int | None = Field(default=None, ge=1)
    """Training steps from one move to the next."""
    threshold: float | None = Field(default=None, gt=0.0)
    """It also moves after a step whose mean distance to it (`actor/kl_loss`) is above this."""

    @property
    def moves(self) -> bool:
        return self.every is not None or self.threshold is not None


class TeacherPart(Part):
    """A teacher of a distillation: an adapter on the job's own base."""

    adapter: str = Field(min_length=1)
    """Its adapter, readable by controller and trainer: `job:ID`, `job:ID@STEP`, or a path as in `model.adapter`. Rank,
    alpha and modules must be those of `trainer.lora`."""
    sources: tuple[str, ...] = ()
    """Names of the `data.sources` whose prompts it teaches. Unset: all of them, for an only teacher."""


class ClipSettings(Part):
    """How far the ratio to the old policy counts."""

    clip_range: ClipRange = 1e-5
    clip_range_low: ClipRangeLow = None


class NatsSettings(ClipSettings):
    """The same, or in nats: for losses on the steps of flows."""

    clip_nats: float | None = Field(default=None, gt=0.0)
    """The same limit in nats of the joint ratio; replaces `clip_range` and serves every resolution."""


class TrustRegionSettings(Part):
    """How far a step may be from the old policy's by its KL."""

    kl_threshold: float = Field(default=1e-5, gt=0.0)
    """Flow-DPPO's trust region: KL of a step to the old policy's, mean over its elements."""


class StepWeightSettings(Part):
    """How much each noisy step counts."""

    step_weights: Literal["uniform", "noise"] = "uniform"
    """How much each noisy step counts in a policy loss. noise: as its std, over the mean of all steps that may carry
    noise (TempFlow-GRPO)."""


class LikelihoodSettings(Part):
    """The likelihood that finished samples give."""

    likelihood: Likelihood = "velocity"


class NoiseLevelSettings(Part):
    """Noise levels that are drawn over finished samples."""

    num_noise_levels: NumNoiseLevels = 4
    sigma_sampling: Literal["shifted", "uniform", "schedule"] = "shifted"
    """How those noise levels are drawn. shifted: uniform before the model's shift, so they lie as densely as the
    sampler's. uniform: uniform from `sigma_low` to `sigma_high`. schedule: the sampler's own, in a random order for
    each sample and pass, none twice in a pass."""
    sigma_low: float = Field(default=0.02, gt=0.0, lt=1.0)
    """Least of those noise levels; lower ones are raised to it. Not for `schedule`."""
    sigma_high: float = Field(default=0.98, gt=0.0, lt=1.0)
    """Greatest of those noise levels; higher ones are lowered to it. Not for `schedule`."""


class OldPolicySettings(Part):
    """An old policy that follows the trained one."""

    old_policy: OldPolicyPart = OldPolicyPart()


class PairSettings(Part):
    """Pairs of a better and a worse sample."""

    pairs_per_group: int = Field(default=1, ge=1)
    """Pairs that online DPO makes of a group: best and worst, second best and second worst, …"""


class AdvantageSettings(Part):
    """Advantages that the samples of a group get by their rewards."""

    reward_combination: Literal["sum", "normalized", "separate"] = "sum"
    """Several rewards. sum: advantages of their weighted sum. normalized: the weighted sum of each one's own
    group-normalized advantages, normalized again over the batch (GDPO). separate: the weighted sum of each one's own
    advantages by `advantage_std`, not normalized again (MixGRPO)."""
    advantage_std: AdvantageStd = "global"
    advantage_clamp: AdvantageClamp = 5.0
    diversity: str | None = Field(default=None, min_length=1)
    """Reward of weight 0, such as one by the scorer `diversity`, that multiplies the advantages above 0: a sample's
    score over the mean of its group's (GARDO)."""
    best_of: int | None = Field(default=None, ge=2)
    """Samples of each group that are trained on: the best and the worst half each, by their total of the rewards
    (DanceGRPO's best-of-n); advantages are of the whole group. null trains on all."""


class KlRewardSettings(Part):
    """The KL to the model before training as a cost of a sample of a flow."""

    kl_reward: float = Field(default=0.0, ge=0.0)
    """Cost of a sample's KL to the model before training in its reward: the mean over its noisy steps, measured by
    the rollouts with the adapter off. LoRA only."""


class KlSettings(Part):
    """The distance to the model before training as a part of the loss."""

    kl_coef: KlCoef = 0.0
    kl_reference: KlReferencePart = KlReferencePart()


class KlGateSettings(KlSettings):
    """The same, gated: for flows."""

    kl_gate: KlGatePart = KlGatePart()


class RatioSettings(Part):
    """A ratio to the policy that sampled."""

    old_log_probs: Literal["first_forward", "recompute", "rollout"] = "first_forward"
    """Where the old log-probs come from: the update's own first forward where that is exact (else recomputed), always
    recomputed before the update, or the rollout's own (bypass)."""
    correction: CorrectionPart = CorrectionPart()


class TeacherSettings(Part):
    """Teachers of a distillation."""

    teachers: dict[str, TeacherPart] = Field(default={})
    """Teachers that DiffusionOPD learns from, by names of your own. Each source of prompts has one."""


class LengthSettings(Part):
    """Cost of a text's length."""

    overlong_share: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Last share of `rollout.sequence.max_tokens` in which a sequence's length costs, linearly, up to 1 "
        "off its reward at `max_tokens` (DAPO); 0: length costs nothing.",
    )


class AggregationSettings(Part):
    """How the losses of tokens are averaged."""

    aggregation: Literal["sequence", "token"] = "sequence"
    """Losses of tokens. sequence: mean over each sequence's tokens, then over sequences. token: mean over all tokens of
    an update, so that long sequences count for more."""


class FlowSettings(KlGateSettings, KlRewardSettings, AdvantageSettings, LossSettings):
    """Settings of most losses of flows."""


class PolicySettings(StepWeightSettings, RatioSettings, FlowSettings):
    """Settings of every loss on the log-probs of noisy steps."""


class MatchingSettings(NoiseLevelSettings, FlowSettings):
    """Settings of every loss on new noise over finished samples."""


class PairwiseSettings(PairSettings, NoiseLevelSettings, KlRewardSettings, LossSettings):
    """Settings of every loss on pairs of finished samples."""


class DistillationSettings(TeacherSettings, LossSettings):
    """Settings of every loss on the steps of teachers."""


class GradientSettings(KlGateSettings, LossSettings):
    """Settings of every loss on the gradient of a reward."""


class SequenceSettings(LengthSettings, RatioSettings, KlSettings, AdvantageSettings, LossSettings):
    """Settings of every loss on written tokens."""
