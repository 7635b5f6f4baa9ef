"""Credits each sample of a step in its update: with an advantage, or its place in a pair. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flowfleet.algorithms.advantages import AdvantageStats, combined_advantages, shaped_by_diversity, uncertain
from flowfleet.algorithms.preferences import make_pairs
from flowfleet.algorithms.settings import (
    AdvantageSettings,
    KlGateSettings,
    KlRewardSettings,
    LengthSettings,
    PairSettings,
)
from flowfleet.job.drop_reasons import DropReason
from flowfleet.job.spec import JobSpec, RewardPart
from services.controller.job.machine.batch import Scored
from services.controller.job.policies import OVERLONG
from services.controller.prompts.mixture import Mixture
from services.controller.rewards.composition import PREFERENCE, Columns, columns

_SUM = "sum"
DOUBTED_SHARE = 0.1
"""Share of the doubted samples for which a gated KL counts."""
_KL = "/kl"
"""Column of the KL to the model before training; no reward can have this name."""


@dataclass(frozen=True)
class Credit:
    """Credit of one sample that is trained on."""

    group: int
    index: int
    reward: float
    advantage: float
    """Relative to its group; of pairs 1 for the winner and -1 for the loser."""
    pair: int = 0
    """Number of its pair inside the group."""
    without_kl: bool = False
    """The KL to the reference counts nothing for it."""
    teacher: str = ""
    """Name of the teacher that it is compared with; empty for losses without teachers."""


def credits_of(
    spec: JobSpec, rewards: Mapping[str, RewardPart], step: int, scored: Sequence[Scored]
) -> tuple[list[Credit], AdvantageStats]:
    """The samples that a step trains on, and the statistics of all its rewards, by the rewards of that step.

    Ascending by (group, index), or for a loss on pairs by (group, pair) with the winner first; empty where no pair
    differs. With `algorithm.best_of` the middle of each group is left out; its advantages and the statistics are those
    of whole groups all the same. Raises ValueError without a scored sample.
    """
    groups = [sample.group for sample in scored]
    part = spec.algorithm.of(AdvantageSettings)
    counted = _columns(spec, rewards, step, scored)
    if kl_reward := spec.algorithm.of(KlRewardSettings).kl_reward:
        counted = counted.with_column(_KL, [sample.reference_kl for sample in scored], -kl_reward)
    if spec.algorithm.of(LengthSettings).overlong_share:
        counted = counted.with_column(OVERLONG, [sample.scores.get(OVERLONG, 0.0) for sample in scored], -1.0)
    values, stats = combined_advantages(
        counted.values,
        counted.weights,
        groups,
        combination=part.reward_combination,
        std=part.advantage_std,
        clamp=part.advantage_clamp,
        present=counted.present,
    )
    if part.diversity is not None:
        found = [sample.scores.get(part.diversity, math.nan) for sample in scored]
        values = shaped_by_diversity(values, found, groups, clamp=part.advantage_clamp)
        stats = _with_advantages(stats, values.tolist())
    if not spec.loss.traits.reads_rewards:
        return _taught(scored, spec, step), _with_advantages(stats, [0.0])
    if not spec.loss.needs_pairs:
        credits = [_credit(sample, value) for sample, value in zip(scored, values.tolist(), strict=True)]
        return best_and_worst(_gated(credits, spec, scored, counted), counted.totals().tolist(), part.best_of), stats
    credits = _paired(scored, counted.totals().tolist(), spec.algorithm.of(PairSettings).pairs_per_group)
    return credits, _with_advantages(stats, [credit.advantage for credit in credits] or [0.0])


def _gated(credits: Sequence[Credit], spec: JobSpec, scored: Sequence[Scored], counted: Columns) -> list[Credit]:
    """Takes the KL off samples that no reward of `algorithm.kl_gate` doubts."""
    gate = spec.algorithm.of(KlGateSettings).kl_gate
    if not gate.rewards:
        return list(credits)
    auxiliary = [[sample.scores.get(name, math.nan) for sample in scored] for name in gate.rewards]
    doubted = uncertain(counted.totals(), auxiliary, DOUBTED_SHARE).tolist()
    return [replace(credit, without_kl=not is_doubted) for credit, is_doubted in zip(credits, doubted, strict=True)]


def _taught(scored: Sequence[Scored], spec: JobSpec, step: int) -> list[Credit]:
    """Credits all samples with the teacher of their source, and without an advantage."""
    sources = Mixture(spec.data.each, spec.seed, spec.rollout.prompts_per_step).of_step(step).tolist()
    teachers = [spec.teacher_of(source.name) for source in spec.data.each]
    return [replace(_credit(sample, 0.0), teacher=teachers[sources[sample.group]]) for sample in scored]


def left_out_reason(spec: JobSpec) -> str:
    """Why a job does not train on samples that have a score, if there are any."""
    return DropReason.NOT_IN_A_PAIR if spec.loss.needs_pairs else DropReason.NOT_BEST_OR_WORST


def best_and_worst(credits: Sequence[Credit], totals: Sequence[float], best_of: int | None) -> list[Credit]:
    """The best and the worst `best_of / 2` samples of each group, by their `totals`, in the given order.

    An odd `best_of` takes one more of the best, as DanceGRPO's code does. Of equal totals those of higher index
    count as better. Groups of no more than `best_of` samples stay whole, and so does everything where it is None.
    """
    if best_of is None:
        return list(credits)
    groups: dict[int, list[tuple[float, int]]] = {}
    for credit, total in zip(credits, totals, strict=True):
        groups.setdefault(credit.group, []).append((total, credit.index))
    left_out: set[tuple[int, int]] = set()
    for group, ranked in groups.items():
        middle = sorted(ranked)[best_of // 2 : max(0, len(ranked) - (best_of - best_of // 2))]
        left_out.update((group, index) for _, index in middle)
    return [credit for credit in credits if (credit.group, credit.index) not in left_out]


def _paired(scored: Sequence[Scored], totals: Sequence[float], pairs_per_group: int) -> list[Credit]:
    pairs = make_pairs(totals, [sample.group for sample in scored], pairs_per_group)
    return [
        credit
        for pair in pairs
        for credit in (
            _credit(scored[pair.winner], 1.0, pair.number),
            _credit(scored[pair.loser], -1.0, pair.number),
        )
    ]


def _credit(sample: Scored, advantage: float, pair: int = 0) -> Credit:
    return Credit(sample.group, sample.index, sample.score, advantage, pair)


def _columns(spec: JobSpec, rewards: Mapping[str, RewardPart], step: int, scored: Sequence[Scored]) -> Columns:
    """Reward columns of the step; an old ledger, which has only sums, gets one reward of weight 1."""
    scores, groups = [sample.scores for sample in scored], [sample.group for sample in scored]
    sources = Mixture(spec.data.each, spec.seed, spec.rollout.prompts_per_step).of_step(step)[groups]
    parts = [spec.data.scoring(source.name, rewards) for source in spec.data.each]
    if not all(scores):
        parts, scores = [{_SUM: RewardPart()}] * len(parts), [{_SUM: sample.score} for sample in scored]
    elif spec.method.data == "preferences":
        parts = [{PREFERENCE: RewardPart()}] * len(parts)
    return columns(parts, sources, step, scores, groups)


def _with_advantages(stats: AdvantageStats, advantages: Sequence[float]) -> AdvantageStats:
    return replace(
        stats,
        advantage_mean=statistics.fmean(advantages),
        advantage_max=max(advantages),
        advantage_min=min(advantages),
    )
