"""How a command says that it must wait."""

from __future__ import annotations


class NotYet(Exception):
    """A command cannot be done now and will be asked for again. The message becomes the job's reason when that takes
    long."""


class WaitedInVain(NotYet):
    """It has waited for long already: the message becomes the job's reason at once."""
