"""Since when a reward fails, and what may be tried meanwhile. Pure, seconds of a monotonic clock."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from flowfleet.backoff import backoff_s
from services.controller.rewards.answers import Answer
from services.controller.rewards.failures import RewardPending

FIRST_DELAY_S, MAX_DELAY_S = 0.2, 5.0
PENDING_SHARE, FIRST_PENDING_S, MAX_PENDING_S = 0.1, 0.5, 30.0
"""Pending scores are asked for again after this share of the time that they have been waited for, within these limits:
calls become rare, and waiting costs little besides."""
PROBE_EVERY_S = 10.0
"""While a reward counts as failed, one call finds out whether it is back, and so long after its end another; the others
do not wait."""


@dataclass
class Attempt:
    """To have some samples scored, from the first call until all rewards have answered."""

    started: float
    answers: dict[str, dict[str, Answer]] = field(default_factory=dict)
    """Answers of rewards that are not called again."""
    failures: dict[str, int] = field(default_factory=dict)
    """Consecutive failures by reward."""
    pending: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Reward whose scores are pending → when it is asked again, and what it waits for."""
    left_at: float | None = None
    """When its last try ended; None while there is one."""

    @contextmanager
    def in_use(self, clock: Callable[[], float]) -> Iterator[None]:
        """Around a try."""
        self.left_at = None
        try:
            yield
        finally:
            self.left_at = clock()

    def idle_s(self, now: float) -> float:
        """Seconds since this scoring was last continued."""
        return 0.0 if self.left_at is None else now - self.left_at

    def wait(self, reward: str, why: str, now: float) -> None:
        """The reward said that its scores are pending."""
        pause = min(max(PENDING_SHARE * (now - self.started), FIRST_PENDING_S), MAX_PENDING_S)
        self.pending[reward] = (now + pause, why)

    def check_due(self, reward: str, now: float) -> None:
        """Raises RewardPending until the reward is to be asked again."""
        due, why = self.pending.get(reward, (now, ""))
        if due > now:
            raise RewardPending(f"rewards.{reward} waits: {why}", due - now)

    def delay(self, reward: str) -> float:
        """Before the reward's next call: 0, 0.2, 0.4, … s."""
        return backoff_s(self.failures.get(reward, 0), FIRST_DELAY_S, MAX_DELAY_S)


@dataclass
class Outage:
    """Outage of one reward, over all samples; none while `since` is None."""

    since: float | None = None
    """When the first of the samples were sent that it failed on, or when it last worked if that was later."""
    worked_at: float = float("-inf")
    reason: str = ""
    given_up: bool = False
    """It has failed for too long: calls are probes."""
    probing: bool = False
    """A probe is running."""
    probed_at: float = float("-inf")
    """When the last one came back."""

    def failed(self, started: float, reason: str) -> float:
        """A call failed, of samples first sent at `started`. Since when all calls have failed."""
        since = max(started, self.worked_at)
        self.since = since if self.since is None else min(self.since, since)
        self.reason = reason
        return self.since

    def worked(self, now: float) -> None:
        self.since, self.reason, self.given_up, self.worked_at = None, "", False, now

    def give_up(self, now: float) -> None:
        if not self.given_up:
            self.given_up, self.probed_at = True, now

    def may_ask(self, now: float) -> bool:
        """True if a call may begin now. A reward that counts as failed gets one at a time, `PROBE_EVERY_S` apart."""
        return not self.given_up or (not self.probing and now - self.probed_at >= PROBE_EVERY_S)

    @contextmanager
    def asking(self, clock: Callable[[], float]) -> Iterator[None]:
        """Around a call that may be made."""
        is_probe = self.given_up
        self.probing |= is_probe
        try:
            yield
        finally:
            if is_probe:
                self.probing, self.probed_at = False, clock()
