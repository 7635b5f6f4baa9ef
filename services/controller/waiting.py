"""How a command says that it must wait, or that its job must give way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

Check = Callable[[], Awaitable[bool]]
"""Returns True once the cause of a pause is gone."""


class NotYet(Exception):
    """A command cannot be done now and will be asked for again. The message becomes the job's reason when that takes
    long."""

    again_s = 0.5
    """Seconds until it is asked for again."""


class WaitedInVain(NotYet):
    """It has waited for long already: the message becomes the job's reason at once."""


class Queued(WaitedInVain):
    """Another system decides when it may begin."""

    again_s = 3.0


class NoPlace(Exception):
    """A trainer's pods found no place in time. The job returns to the queue, so that other jobs may run."""
