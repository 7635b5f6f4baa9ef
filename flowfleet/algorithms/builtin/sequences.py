"""Losses of policies that write tokens."""

from typing import Literal

from flowfleet.algorithms.builtin.policy import TWO_UPDATES
from flowfleet.algorithms.kinds import OBJECTIVES, Kind, register_kind
from flowfleet.algorithms.registry import Loss, register_loss
from flowfleet.algorithms.settings import (
    AdvantageClamp,
    AdvantageStd,
    AggregationSettings,
    ClipRange,
    ClipRangeLow,
    ClipSettings,
    CorrectionPart,
    KlCoef,
    SequenceSettings,
)

_SEQUENCES = "flowfleet.algorithms.sequences.losses"


class SequenceCorrectionPart(CorrectionPart):
    """The correction of a loss that has one ratio a sequence."""

    level: Literal["step", "sequence"] = "sequence"
    """Unit with a ratio of its own, a geometric mean: each noisy step of a sample or token of a text, or the sample by
    all of them."""


class GspoSettings(ClipSettings, SequenceSettings):
    """Settings of GSPO's loss."""

    clip_range: ClipRange = 4e-4
    clip_range_low: ClipRangeLow = 3e-4
    advantage_std: AdvantageStd = "group"
    advantage_clamp: AdvantageClamp = None
    correction: SequenceCorrectionPart = SequenceCorrectionPart()


class GrpoSettings(AggregationSettings, ClipSettings, SequenceSettings):
    """Settings of GRPO's loss on tokens."""

    clip_range: ClipRange = 0.2
    kl_coef: KlCoef = 0.04
    advantage_std: AdvantageStd = "group"
    advantage_clamp: AdvantageClamp = None


register_kind(Kind("sequence", SequenceSettings, f"{OBJECTIVES}.sequence:SequenceObjective", "tokens", has_ratio=True))

for _loss in (
    Loss("gspo", f"{_SEQUENCES}:gspo", "sequence", settings=GspoSettings, defaults=TWO_UPDATES, by_sequence=True),
    Loss("grpo", f"{_SEQUENCES}:grpo", "sequence", settings=GrpoSettings, defaults=TWO_UPDATES),
):
    register_loss(_loss)
