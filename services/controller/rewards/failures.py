"""Decides what a job does when a reward gives no scores: it tries again, or pauses."""

import grpc

from flowfleet.rewards import failures
from services.controller.waiting import Check, NotYet, WaitedInVain


class RewardFailure(NotYet):
    """A reward gave no scores. It is asked again, unless `permanent`: then somebody must change something first. If it
    `may_heal`, that may be under way: new tokens reach services one after the other."""

    def __init__(self, message: str, *, permanent: bool = False, may_heal: bool = False) -> None:
        super().__init__(message)
        self.permanent, self.may_heal = permanent, may_heal


class RewardPending(WaitedInVain):
    """Scores of a reward are not there yet, which is not a failure: the job says so and asks again in `again_s`."""

    def __init__(self, message: str, again_s: float) -> None:
        super().__init__(message)
        self.again_s = again_s


class RewardPause(Exception):
    """The job must pause because a reward failed for too long. The message is the job's reason. `until` asks the reward
    again: True once it answers; None where a user must change something first."""

    def __init__(self, reason: str, until: Check | None = None) -> None:
        super().__init__(reason)
        self.until = until


def of_call(
    name: str, service: str, address: str, error: grpc.aio.AioRpcError, deadline_s: float | None
) -> RewardFailure:
    """Returns the failure of a call to the reward `name`. `deadline_s`: `timeouts.score_s`; None for Describe."""
    return RewardFailure(
        failures.of_call(name, service, address, error, deadline_s, "controller"),
        permanent=error.code() in failures.PERMANENT,
        may_heal=failures.may_heal(error),
    )


def why_failed(
    name: str, failure: RewardFailure, waited_s: float | None, is_away: bool, *, by_itself: bool = False
) -> str:
    """Why a job pauses for a reward that failed: at once (None), or for so long, on all samples or on the same ones.
    `by_itself`: the job resumes when the reward answers."""
    of_what = "" if is_away else " on the same samples, while others were scored"
    waited = "" if waited_s is None else f" It failed for timeouts.rewards_s = {waited_s:g} s{of_what}."
    then = "the job then resumes by itself" if by_itself else "then resume the job"
    return (
        f'{failure}.{waited} The job is paused as rewards.{name}.on_failure = "pause" says: put it right (a file of '
        f"`flowfleet up`: `flowfleet rewards reload {name}`), {then}; its samples are kept and "
        "asked for again"
    )


def why_pending(name: str, why: str, waited_s: float) -> str:
    """Why a job pauses for a reward whose scores are pending."""
    return (
        f"rewards.{name} gave no scores within timeouts.pending_s = {waited_s:g} s: {why}. The job is paused as "
        f'rewards.{name}.on_failure = "pause" says: resume it to wait again; its samples are kept'
    )
