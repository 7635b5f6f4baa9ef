"""A job's turn at the replicas of its pool: which of its commands may start now.

    Generate, Validate, Publish    need the turn, except where the trainer's own ranks make all samples
    everything else                starts at once: training overlaps with the turns of other jobs

Publish also waits for a running update, after which its version would not be the trainer's any more.

Jobs that share replicas share the turn. While others wait, a turn covers what is published and validated, and the
samples of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.controller.fleet.turns import Turns
from services.controller.job.machine.command import Command, Generate, Publish, TrainStep, Validate
from services.controller.job.machine.state_machine import Machine


class Turn:
    """`tell` is called when the job has the turn that it waited for."""

    def __init__(self, turns: Turns, job_id: str, machine: Machine, tell: Callable[[], None]) -> None:
        self._turns, self._job_id, self._machine, self._tell = turns, job_id, machine, tell
        self._pool = machine.spec.rollout.pool
        self._needed = self._pool in machine.spec.pools
        self._step: int | None = None
        """Step that is sampled in this turn."""

    @property
    def is_ours(self) -> bool:
        return not self._needed or self._turns.has(self._pool, self._job_id)

    def startable(self, wanted: Iterable[Command], running: Iterable[Command]) -> set[Command]:
        """Commands of `wanted` that may start with those that run. Takes the turn, or leaves it."""
        trains = any(isinstance(command, TrainStep) for command in running)
        commands = {command for command in wanted if not (trains and isinstance(command, Publish))}
        uses = set(filter(_uses_replicas, commands))
        busy = set(filter(_uses_replicas, running))
        if not self._needed or not (uses or busy or self.is_ours):
            return commands
        others = self._turns.is_wanted(self._pool)
        if not others:
            self._step = None
        held_back = self._beyond(uses, busy) if others else set[Command]()
        if not busy and (not uses - held_back or not self._can_publish(others, trains)):
            self.leave()
            return commands - uses
        if not self._turns.take(self._pool, self._job_id, self._tell):
            return commands - uses
        return commands - held_back

    def leave(self) -> None:
        self._turns.leave(self._pool, self._job_id)
        self._step = None

    def _beyond(self, uses: set[Command], busy: set[Command]) -> set[Command]:
        """Commands for later steps than the one of this turn; publishing too, once that step is sampled."""
        steps = [command.step for command in uses | busy if isinstance(command, Generate)]
        if self._step is None:
            self._step = min(steps, default=None)
        if self._step is None or any(isinstance(command, Validate) for command in uses):
            return set()
        is_sampled = all(step > self._step for step in steps)
        return uses if is_sampled else {c for c in uses if isinstance(c, Generate) and c.step > self._step}

    def _can_publish(self, others: bool, trains: bool) -> bool:
        """A job without its trainer cannot bring its weights to replicas that do not fetch them: it keeps those that it
        has, as long as no other job waits for them. One whose trainer trains asks for a turn that others want when that
        has ended."""
        has_trainer = self._machine.state.trainer_version is not None or self._job_id in self._turns.stored
        if self.is_ours:
            return has_trainer or not others
        return has_trainer and not (trains and self._turns.is_taken(self._pool, self._job_id))


def _uses_replicas(command: Command) -> bool:
    return isinstance(command, Generate | Validate | Publish)
