"""Checks of this machine for a stack, apart from packages. Each returns its findings and raises nothing.

Imports of extras stay inside the checks, so that the base install has a doctor too.
"""

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from flowfleet.cli.doctor.finding import Finding, note, ok, problem
from flowfleet.extras import pip_install
from flowfleet.hardware.accelerators import missing_devices, visible_devices
from flowfleet.local.ports import is_free
from flowfleet.local.stack import DEFAULT_PORT, StateDir

GIB: Final = 2**30
DISK_GIB: Final = 10.0
"""Less free space than this is worth a note: a checkpoint of a large model has tens of GiB."""
SHARED_MEMORY: Final = Path("/dev/shm")
SHARED_GIB: Final = 0.25
"""Less than this is worth a note: NCCL and torch share memory there, and most containers have 64 MiB."""
OLDEST_REDIS: Final = (6, 2)
REDIS_OF_RIGHTS: Final = (7, 0)
"""First version whose users may be limited to commands on keys."""


def look_at_machine(state: StateDir) -> Iterator[Finding]:
    """Findings about this machine, for a stack in that state directory."""
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()} at {sys.executable}"
    yield ok("system", system) if sys.platform == "linux" else problem("system", system, "run stacks on Linux")
    yield from _devices()
    yield _redis()
    yield _port(state)
    folder = next(folder for folder in (state.path, *state.path.parents) if folder.exists())
    yield _room("disk", folder, DISK_GIB, "free space, or give another --state-dir")
    if SHARED_MEMORY.is_dir():
        yield _room("shared memory", SHARED_MEMORY, SHARED_GIB, "start the container with --shm-size=1g or more")


def _devices() -> Iterator[Finding]:
    try:
        missing, visible = missing_devices(()), visible_devices()
    except OSError as error:
        yield problem("accelerators", str(error), "repair the driver, or set FLOWFLEET_DEVICE=cpu")
        return
    if missing:
        yield problem("accelerators", missing, "unset FLOWFLEET_DEVICE, or repair the driver")
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    from flowfleet.hardware.devices import is_accelerator, memory_bytes, pick_device

    build = f"torch {torch.__version__}"
    try:
        device = pick_device()
    except ValueError as error:
        yield problem("torch", str(error), "install a build of torch for this accelerator")
        return
    size = memory_bytes(device)
    if not is_accelerator(device) and visible:
        advice = "install a build of torch for this accelerator and driver, or set FLOWFLEET_DEVICE=cpu"
        yield problem("torch", f"{build} cannot use accelerator {', '.join(visible)}", advice)
    elif size is None:
        yield ok("torch", f"{build} on {os.cpu_count()} CPUs: enough for the tiny models")
    else:
        yield ok("torch", f"{build} on {device.type} {', '.join(visible)}; the first has {size / GIB:.0f} GiB")


def _redis() -> Finding:
    if importlib.util.find_spec("redis") is None:
        return problem("redis", "the Redis client is not installed", pip_install("local"))
    from flowfleet.errors import Unavailable
    from flowfleet.redis.server import find_redis_server, server_version

    try:
        server = find_redis_server()
    except Unavailable as error:
        return problem("redis", "no redis-server", str(error).partition(": ")[2])
    version = server_version(server)
    server_text = f"{'.'.join(map(str, version)) or 'unknown version'}, {server}"
    if version < OLDEST_REDIS:
        return problem("redis", server_text, f"install Redis {'.'.join(map(str, OLDEST_REDIS))} or newer; 7 is best")
    if version < REDIS_OF_RIGHTS:
        return note("redis", server_text, "works; Redis 7 also limits each kind of service to its own keys")
    return ok("redis", server_text)


def _port(state: StateDir) -> Finding:
    stack = state.read()
    if stack is not None:
        return ok("port", f"{stack.url} is this machine's stack")
    if is_free(DEFAULT_PORT):
        return ok("port", f"{DEFAULT_PORT} is free")
    return problem("port", f"{DEFAULT_PORT} is taken by another program", "start with `flowfleet up --port 0`")


def _room(check: str, folder: Path, wanted_gib: float, advice: str) -> Finding:
    free = shutil.disk_usage(folder).free / GIB
    space = f"{free:.1f} GiB free in {folder}"
    return ok(check, space) if free >= wanted_gib else note(check, space, advice)
