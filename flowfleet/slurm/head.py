"""The fleet of an allocation, from start to stop, supervised on the first node.

SIGUSR1, which Slurm sends some minutes before the time limit, and SIGTERM end it alike: trainers save, Redis's data is
copied. After SIGUSR1 the job is then queued again, and its next run continues from there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from flowfleet.errors import Unavailable
from flowfleet.local.files import write_atomically
from flowfleet.local.plan import StackOptions
from flowfleet.local.stack import Stack, StackError, StateDir
from flowfleet.local.supervision.cleanup import end_stack
from flowfleet.local.supervision.supervisor import Supervisor
from flowfleet.slurm.allocation import Allocation, find_allocation
from flowfleet.slurm.copies import Copies, check_folder, local_folder
from flowfleet.slurm.plan import num_ports, plan_fleet
from flowfleet.slurm.tools import end_steps, slurm, steps_of

SCRIPT: Final = "slurm.sh"
"""In the state directory: the script that `flowfleet slurm up` submitted."""
CLIENT: Final = "client.env"
"""In the state directory: what a shell needs to reach the controller (0600)."""
JOB_FILE: Final = "slurm.json"
"""In the state directory: the id of the fleet's job."""
DOWN: Final = "down"
"""In the state directory once a user has ended the fleet: it is not queued again."""
ENDING: Final = "ending"
"""In the state directory while the fleet ends: why, in words."""
STEP_PREFIX: Final = "ff-"

log = logging.getLogger(__name__)


def run_in_allocation(
    options: StackOptions, on_ready: Callable[[Stack], None], env: Mapping[str, str] = os.environ
) -> None:
    """Supervises a fleet in this allocation until a signal. Raises StackError, after everything has ended."""
    stop, at_limit = threading.Event(), threading.Event()

    def on_signal(number: int, _: object) -> None:
        if number != signal.SIGUSR1:  # who ends a fleet does not want it again
            at_limit.clear()
        elif not stop.is_set():
            at_limit.set()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, on_signal)
    check_folder(options.state_dir)
    state = StateDir(options.state_dir)
    with state.lock():
        end_stack(state)
        (state.path / ENDING).unlink(missing_ok=True)
        allocation, ports = find_allocation(state.path, num_ports(options), env)
        live = local_folder(state.path, allocation.key, env)
        copies = Copies(live, state.path)
        if copies.restore():
            log.warning("Redis starts from the copy in %s", state.path)
        try:
            plan = plan_fleet(options, allocation, ports, live)
            supervisor = Supervisor(
                plan,
                state,
                start_timeout_s=options.start_timeout_s,
                hang_s=options.hang_s,
                grace_s=allocation.drain_s,
            )
            threading.Thread(target=copies.keep, args=(stop,), name="copies of Redis", daemon=True).start()
            threading.Thread(target=_say_why, args=(stop, at_limit, state.path), daemon=True).start()
            supervisor.run(stop, lambda stack: _ready(stack, on_ready, plan.ca))
        except Unavailable as error:
            raise StackError(str(error)) from None
        finally:
            _end_left_steps(allocation)
            with contextlib.suppress(OSError):
                copies.copy()
            shutil.rmtree(live, ignore_errors=True)
    if at_limit.is_set():
        _begin_again(allocation, state.path)


def write_job(folder: Path, said: str) -> str:
    """Notes the job that `sbatch --parsable` named, and returns its id."""
    job_id = said.strip().partition(";")[0]
    write_atomically(folder / JOB_FILE, json.dumps({"job_id": job_id}))
    return job_id


def _say_why(stop: threading.Event, at_limit: threading.Event, folder: Path) -> None:
    """Writes why the fleet ends, so that the controller tells a trainer that ends with it from one that fails."""
    stop.wait()
    with contextlib.suppress(OSError):
        write_atomically(
            folder / ENDING, "the job's time limit is near" if at_limit.is_set() else "the fleet is stopped"
        )


def _ready(stack: Stack, on_ready: Callable[[Stack], None], ca: str) -> None:
    """Writes what a shell on another machine needs."""
    variables = {"FLOWFLEET_URL": stack.url, "FLOWFLEET_CA": ca, "FLOWFLEET_API_KEY": stack.api_key}
    lines = (f"export {name}={shlex.quote(value)}\n" for name, value in variables.items() if value)
    write_atomically(Path(stack.state_dir) / CLIENT, "".join(lines))
    on_ready(stack)


def _end_left_steps(allocation: Allocation) -> None:
    try:
        left = [name for name in steps_of(allocation.job_id) if name.startswith(STEP_PREFIX)]
        end_steps(allocation.job_id, left)
    except StackError as error:
        log.warning("steps may be left: %s", error)


def _begin_again(allocation: Allocation, folder: Path) -> None:
    """Queues the job again, or a successor where it may not be. A shell of `salloc` has neither."""
    if (folder / DOWN).exists():
        return
    try:
        slurm("scontrol", "requeue", allocation.job_id)
    except StackError as error:
        log.warning("not queued again: %s", error)
        if (folder / SCRIPT).exists():
            after = f"--dependency=afterany:{allocation.job_id}"
            write_job(folder, slurm("sbatch", "--parsable", after, str(folder / SCRIPT)))
