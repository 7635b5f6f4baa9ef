"""Asks each process of the stack again and again whether it still answers, so that one that hangs is noticed.

A thread for each process, since a question to a process that hangs takes its whole deadline. What is counted are
questions in a row without a good answer, not seconds: a supervisor that was suspended itself has asked nothing
meanwhile, and counts no failure for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from flowfleet.local.plan import Plan, ProcessPlan
from flowfleet.local.supervision.child import MAX_MISSED, Child

Alive = Callable[[ProcessPlan, Plan, float], bool]
"""Function that returns True if a process answers as it should within so many seconds."""


def start_checkups(
    children: Iterable[Child], plan: Plan, alive: Alive, found_out_s: float, stop: threading.Event
) -> None:
    """Checks processes until `stop` is set. Detecting one that does not answer takes `found_out_s`."""
    for child in children:
        given = (child, plan, alive, found_out_s / MAX_MISSED, stop)
        threading.Thread(target=_check, args=given, name="checkup", daemon=True).start()


def _check(child: Child, plan: Plan, alive: Alive, every_s: float, stop: threading.Event) -> None:
    """Asks every `every_s`, which is also how long an answer may take."""
    asked_s = 0.0
    while not stop.wait(max(0.0, every_s - asked_s)):
        began, pid = time.monotonic(), child.pid
        child.checked(pid, alive(child.plan, plan, every_s))
        asked_s = time.monotonic() - began
