"""Limits on what a validation may show: how far a job's reward and one that it only watches may part
(`schedule.max_disagreement`), how far its reward may fall (`schedule.max_reward_drop`), and what a job says that paused
for one of them.

A watched reward has weight 0. With b the version at which it had its greatest held-out mean so far, at version v

    disagreement = (mean at b - mean at v) / std    if the total reward at v is at least that at b, else 0

where std is the greatest standard deviation over held-out samples of any validation so far (ddof 0). A policy that
hacks its reward shows it so: the total rises on, and what is watched falls. While both rise, or both fall, it is 0.
With t the version of the greatest total reward so far, and std that of totals,

    drop = (total at t - total at v) / std

A policy that breaks, as at too high a learning rate, shows it so. A validation with few scores, as while a reward
failed, is in neither (`complete`).

The page's mark (page/static/lib/signs.js) asks the eye instead: it compares late values with early ones once there are
four, also of training samples, image statistics and the held-out reward itself, and stops nothing.
"""

from collections.abc import Mapping, Sequence

from flowfleet.job.spec import JobSpec, RewardPart
from services.controller.job.machine.events import Validated
from services.controller.store.records import Validation

DISAGREEMENT, REWARD_DROP, REWARD_STD = "val/disagreement", "val/reward_drop", "val/reward_std"
NUM_SCORED = "val/num_scored"


def watched(rewards: Mapping[str, RewardPart]) -> list[str]:
    """Names of the rewards that count for nothing at any step."""
    return [name for name, part in rewards.items() if not part.has_influence]


def complete(validations: Sequence[Validation]) -> list[Validation]:
    """Leaves out those with less than half as many scored samples as the one that has most."""
    numbers = [one.values.get(NUM_SCORED) for one in validations]
    most = max((number for number in numbers if number is not None), default=0.0)
    return [one for one, number in zip(validations, numbers, strict=True) if number is None or 2 * number >= most]


def largest_disagreement(validations: Sequence[Validation], names: Sequence[str]) -> tuple[str, float] | None:
    """The watched reward that the newest validation is furthest from, and its disagreement, in standard deviations.
    None where no reward is watched, or none has a mean. `validations`: by version, ascending, of one revision."""
    found = {name: _disagreement(validations, name) for name in names}
    known = {name: value for name, value in found.items() if value is not None}
    return max(known.items(), key=lambda item: item[1]) if known else None


def reward_drop(validations: Sequence[Validation]) -> tuple[int, float] | None:
    """The version of the greatest total reward, and what the newest validation has lost since, in standard deviations.
    None where that has no reward. `validations`: by version, ascending, of one revision."""
    known = [(one.version, one.reward, one.values.get(REWARD_STD)) for one in validations if one.reward is not None]
    if not validations or validations[-1].reward is None:
        return None
    best, most, _ = max(known, key=lambda row: row[1])
    std = max(std or 0.0 for _, _, std in known)
    return best, (most - known[-1][1]) / std if std > 0 else 0.0


def reason(spec: JobSpec, validated: Validated) -> str:
    """Reason for the user to pause after this validation: which limit, by how much, and what to do. Empty where it is
    within the job's limits."""
    schedule = spec.schedule
    if _is_above(validated.disagreement, schedule.max_disagreement):
        lost = (
            f"since its best validation rewards.{validated.parted} has lost {validated.disagreement:.2f} of its "
            f"standard deviations, above schedule.max_disagreement = {schedule.max_disagreement:g}, while the job's "
            "reward has not fallen. Look at the samples (`flowfleet samples ID --purpose validate --disagree 20`); "
            "then finish"
        )
        other = "other rewards or algorithm.kl_coef"
    elif _is_above(validated.reward_drop, schedule.max_reward_drop):
        lost = (
            f"since version {validated.best} the held-out reward has lost {validated.reward_drop:.2f} of its standard "
            f"deviations, above schedule.max_reward_drop = {schedule.max_reward_drop:g}. Finish"
        )
        other = "a lower trainer.optimizer.lr"
    else:
        return ""
    return (
        f"version {validated.version}: {lost} the job, submit one from an earlier checkpoint "
        f"with {other}, or resume it: it continues unchanged to the next validation"
    )


def _is_above(found: float | None, limit: float | None) -> bool:
    return limit is not None and found is not None and found > limit


def _disagreement(validations: Sequence[Validation], name: str) -> float | None:
    rows = [(one.reward, *(one.values.get(_metric(name, what)) for what in ("mean", "std"))) for one in validations]
    known = [(total, mean, std or 0.0) for total, mean, std in rows if total is not None and mean is not None]
    if not known or not rows or rows[-1][0] is None or rows[-1][1] is None:
        return None
    total, mean, _ = known[-1]
    best_total, best, _ = max(known, key=lambda row: row[1])
    std = max(row[2] for row in known)
    return (best - mean) / std if total >= best_total and std > 0 else 0.0


def _metric(name: str, what: str) -> str:
    return f"val-core/rewards/{name}/{what}"
