"""Starts the processes of a stack, keeps them alive and ends them.

A loop looks at every process a few times a second. While the stack starts, a process that ends is an error, told with
the end of its log; afterwards it is started again, on the same port, with growing delays. From then on each is asked
whether it still answers, and killed when it hangs.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from flowfleet.local.devices import DEVICES_FILE, Devices, pool_owner
from flowfleet.local.files import Watched
from flowfleet.local.plan import OfPool, Plan, ProcessPlan, found_out_s
from flowfleet.local.pools import POOLS_FILE, Pool, read_pools
from flowfleet.local.ports import free_ports
from flowfleet.local.stack import MARK, Stack, StackError, StateDir
from flowfleet.local.supervision.child import MAX_MISSED, Child
from flowfleet.local.supervision.cleanup import GRACE_S, end_stack
from flowfleet.local.supervision.health import is_alive, serves
from flowfleet.local.supervision.watchdog import dismiss, start_watchdog
from flowfleet.process.commands import ROLLOUT, TRAINER, forkserver_command
from flowfleet.process.forks import Address, ForkServer, fork_environment
from flowfleet.process.logs import cap
from flowfleet.process.pulse import HANG_S
from flowfleet.rpc.kinds import without_own

logger = logging.getLogger(__name__)

POLL_S = 0.05
START_TIMEOUT_S = 900.0


class Supervisor:
    """Runs one stack in one state directory, whose lock the caller holds."""

    def __init__(
        self,
        plan: Plan,
        state: StateDir,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        hang_s: float = HANG_S,
        grace_s: float = GRACE_S,
    ) -> None:
        """`grace_s`: how long processes may take to end when the stack stops."""
        self._plan = plan
        self._state = state
        self._start_timeout_s = start_timeout_s
        self._hang_s = hang_s
        self._grace_s = grace_s
        self._forks = StackForks(plan, state)
        self._children = [self._child(process) for process in plan.processes]
        self._pools = Watched(state.path / POOLS_FILE)
        self._pools.has_changed()

    def run(self, stop: threading.Event, on_ready: Callable[[Stack], None]) -> None:
        """Blocks until `stop` is set, then ends everything. Calls `on_ready` once when every process serves.

        Raises StackError when a process ends or is not healthy within `start_timeout_s` of the start.
        """
        self._state.logs.mkdir(parents=True, exist_ok=True)
        watchdog = start_watchdog(self._state)
        try:
            self._start(stop)
            if not stop.is_set():
                on_ready(self._publish())
            start_checkups(self._children, self._plan, found_out_s(self._hang_s), stop)
            self._keep(stop)
        finally:
            stop.set()
            ended = end_stack(self._state, self._grace_s)
            self._forks.close()
            dismiss(watchdog)
            logger.info("stack stopped, %d processes ended", ended)

    def _start(self, stop: threading.Event) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        for child in self._children:
            child.start()
        while waiting := [child for child in self._children if not child.healthy]:
            for child in waiting:
                if (code := child.exit_code()) is not None:
                    raise StackError(self._complaint(child, f"ended with code {code} while the stack started"))
                child.healthy = serves(child.plan, self._plan)
            if time.monotonic() > deadline:
                raise StackError(self._complaint(waiting[0], f"does not serve after {self._start_timeout_s:.0f} s"))
            if stop.wait(POLL_S):
                return

    def _keep(self, stop: threading.Event) -> None:
        is_published = True
        while not stop.wait(POLL_S):
            for log in self._state.logs.glob("*.log"):  # those of this process, the watchdog and fork servers too
                cap(log)
            restarted = [child for child in self._children if child.poll()]
            if self._follow_pools(stop) or restarted or not is_published:
                try:
                    self._publish()
                    is_published = True
                except OSError as error:  # a full disk does not end the stack
                    is_published = False
                    if restarted:
                        logger.warning("stack.json names a process that ended, until it can be written: %s", error)

    def _follow_pools(self, stop: threading.Event) -> bool:
        """Starts and ends rollouts as pools.json says. True if others run than before."""
        before = list(self._children)
        try:
            if self._plan.of_pool is not None and self._pools.has_changed():
                self._change_pools(read_pools(self._pools.path), self._plan.of_pool, stop)
            for child in [child for child in before if child.ends and child.exit_code() is not None]:
                self._drop(child)
        except (StackError, OSError) as error:  # no memory to fork, or a full disk: the others serve
            logger.error("pools may be missing: %s", error)
        return self._children != before

    def _drop(self, child: Child) -> None:
        """Forgets an ended process of a removed pool, and with the last one gives the pool's devices back."""
        self._children.remove(child)
        child.is_over = True
        logger.info("%s of a removed pool ended", child.plan.name)
        (self._state.records / f"{child.plan.name}.json").unlink(missing_ok=True)
        if child.plan.pool not in {other.plan.pool for other in self._children}:
            Devices(self._state.path / DEVICES_FILE).release(pool_owner(child.plan.pool))

    def _change_pools(self, wanted: Mapping[str, Pool], of_pool: OfPool, stop: threading.Event) -> None:
        for child in self._children:
            if child.plan.pool and child.plan.pool not in wanted:
                child.end()
        for name in wanted.keys() - {child.plan.pool for child in self._children}:
            for child in map(self._child, of_pool(wanted[name], iter(free_ports(2 * wanted[name].replicas)))):
                child.start()
                self._children.append(child)
                start_checkups([child], self._plan, found_out_s(self._hang_s), stop)

    def _child(self, plan: ProcessPlan) -> Child:
        return Child(plan, self._state, self._start_timeout_s, self._forks.address)

    def _publish(self) -> Stack:
        """Writes stack.json as things are now."""
        stack = Stack(
            url=self._plan.url,
            redis_url=self._plan.redis_url,
            state_dir=str(self._state.path),
            supervisor=os.getpid(),
            processes={child.plan.name: child.describe() for child in self._children},
            trainer_devices=self._plan.placement.trainer,
            warning=self._plan.warning,
            api_key=self._plan.api_key,
        )
        self._state.write(stack)
        return stack

    def _complaint(self, child: Child, what: str) -> str:
        name = child.plan.name
        return f"{name} {what}; the end of {self._state.log(name)}:\n{self._state.log_tail(name)}"


def start_checkups(children: Iterable[Child], plan: Plan, found_out_s: float, stop: threading.Event) -> None:
    """Checks processes until `stop` is set. Detecting one that does not answer takes `found_out_s`.

    A thread for each process, since a question to a process that hangs takes its whole deadline. What is counted are
    questions in a row without a good answer, not seconds: a supervisor that was suspended itself counts no failure.
    """
    for child in children:
        given = (child, plan, found_out_s / MAX_MISSED, stop)
        threading.Thread(target=_check, args=given, name="checkup", daemon=True).start()


def _check(child: Child, plan: Plan, every_s: float, stop: threading.Event) -> None:
    """Asks every `every_s`, which is also how long an answer may take."""
    asked_s = 0.0
    while not stop.wait(max(0.0, every_s - asked_s)) and not child.is_over:
        began, pid = time.monotonic(), child.pid
        child.checked(pid, is_alive(child.plan, plan, every_s))
        asked_s = time.monotonic() - began


class StackForks:
    """Owns the server, unless FLOWFLEET_FORK_SERVER names one. A stack without rollouts to fork has none."""

    def __init__(self, plan: Plan, state: StateDir) -> None:
        self._shared = Address.from_environ()
        rollout = (sys.executable, "-m", ROLLOUT)
        own = self._shared is None and any(one.forks and one.argv[:3] == rollout for one in plan.processes)
        command = forkserver_command(sys.executable, ROLLOUT, TRAINER)

        def environment() -> dict[str, str]:
            return fork_environment({**without_own(os.environ), MARK: str(state.path)})

        self._server = ForkServer(command, environment, state.log("forkserver")) if own else None

    def address(self) -> Address | None:
        """The server; None while another one, in place of one that has ended, imports."""
        if self._server is None:
            return self._shared
        had_one, is_same = self._server.address is not None, self._server.runs
        address = self._server.ensure()
        return address if is_same or not had_one else None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
