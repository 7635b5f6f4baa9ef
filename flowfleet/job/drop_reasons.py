"""Why samples are dropped: the keys of a job's `samples_dropped`, and the label `reason` of
`flowfleet_job_samples_dropped_total`. The runbook (docs/operations.md) says of each what to do."""

from enum import StrEnum

NON_FINITE_SUM = "non_finite_sum"
"""The sum of a sample's scores overflows."""


class DropReason(StrEnum):
    """Reason of a dropped sample. NAME stands for the name of a reward; `of` puts one in."""

    NO_SCORE = "no_score_NAME"  # the reward rejected the sample, or failed for too long with on_failure "drop"
    GATED = "gated_NAME"  # the reward's gate masked the sample
    REWARD_FAILED = "reward_failed"  # scoring failed five times with an unexpected error
    ROLLOUT_FAILED = "rollout_failed"  # sampling failed five times with an unexpected error, or gave NaN
    NON_FINITE_KL = "non_finite_reference_kl"  # the KL to the reference model is NaN or infinite
    LOST = "lost"  # blobs of the sample vanished or broke several times
    STALE = "stale"  # the sample is older than schedule.max_staleness allows
    OTHER_WEIGHTS = "other_weights"  # Redis lost writes: weights of lost steps made the sample
    CHECKPOINT_LOST = "checkpoint_lost"  # no checkpoint is left of the step that trained on the sample
    FINISHED = "finished"  # the user finished the job, or lowered its steps, while the step was open
    NOT_IN_A_PAIR = "not_in_a_pair"  # the loss trains on pairs, and chose others
    NOT_SELECTED = "not_selected"  # rollout.preview keeps the extremes of a group, and its preview was in the middle
    NOT_BEST_OR_WORST = "not_best_or_worst"  # algorithm.best_of leaves out the middle of a group

    def of(self, reward: str) -> str:
        """The reason with a reward's name."""
        return self.value.replace("NAME", reward)

    def name_in(self, reason: str) -> str:
        """The reward that a reason names; "" for another reason."""
        before, _, _ = self.value.partition("NAME")
        return reason[len(before) :] if reason.startswith(before) else ""


def is_verdict(reason: str) -> bool:
    """True for reasons that come from the rewards: scored again, the sample may stay."""
    of_one = DropReason.NO_SCORE.name_in(reason) or DropReason.GATED.name_in(reason)
    return bool(of_one) or reason in (DropReason.REWARD_FAILED, DropReason.NON_FINITE_KL, NON_FINITE_SUM)
