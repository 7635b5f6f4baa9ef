"""Which accelerators this machine has, and the environment that shows a process some of them. Free of torch."""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

VISIBLE: Final = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Kind of accelerator → the variable that names those a process may use."""
_COUNT_TIMEOUT_S = 60.0


def visible_devices(env: Mapping[str, str] = os.environ, count: Callable[[str], int] | None = None) -> tuple[str, ...]:
    """Identifiers of the accelerators that a process with this environment may use, as `VISIBLE` variables name them.

    Empty on a machine without, and where FLOWFLEET_DEVICE is "cpu". `count` gives how many of a kind ("cuda", "npu")
    the machine has; default: asks the driver. Raises OSError where the driver does not answer.
    """
    wanted = env.get("FLOWFLEET_DEVICE", "auto")
    for kind, variable in VISIBLE.items():
        number = (count or _count)(kind) if wanted in ("auto", kind) else 0
        if devices := tuple(_named(env[variable], number) if variable in env else map(str, range(number))):
            return devices
    return ()


def missing_devices(
    devices: Sequence[str], env: Mapping[str, str] = os.environ, count: Callable[[str], int] | None = None
) -> str:
    """Says what is asked for by name, or by FLOWFLEET_DEVICE, and is not there; empty where this machine has it all.

    A UUID (GPU-…, MIG-…) counts as present where there is any accelerator. Raises OSError as `visible_devices` does.
    """
    wanted = env.get("FLOWFLEET_DEVICE", "auto")
    if wanted not in ("auto", "cpu", *VISIBLE):
        return f"FLOWFLEET_DEVICE is {wanted!r}: use auto, cpu, {' or '.join(VISIBLE)}"
    if wanted == "cpu":
        return f"FLOWFLEET_DEVICE is cpu, but accelerators {', '.join(devices)} are asked for" if devices else ""
    if wanted == "auto" and not devices:
        return ""
    kinds = VISIBLE if wanted == "auto" else (wanted,)
    number = next((available for kind in kinds if (available := (count or _count)(kind))), 0)
    if not number and not devices:
        return f"FLOWFLEET_DEVICE is {wanted}, but this machine has no such accelerator"
    if missing := [name for name in devices if not [*_named(name, number)]]:
        has = f"accelerators 0 to {number - 1}" if number > 1 else "accelerator 0 alone" if number else "no accelerator"
        return f"accelerator {', '.join(missing)} is asked for, but this machine has {has}"
    return ""


def show_only(devices: Sequence[str]) -> dict[str, str]:
    """The environment of a process that is to use these alone; empty for none, which leaves it as it is.

    Both variables are set: a machine has one kind, and ignores the other's.
    """
    return dict.fromkeys(VISIBLE.values(), ",".join(devices)) if devices else {}


def _named(value: str, number: int) -> Iterator[str]:
    """The valid start of a variable's value: as the drivers do, it ends at the first entry that names nothing."""
    for name in map(str.strip, value.split(",") if number else ()):
        if not (name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < number)):
            return
        yield name


def _count(kind: str) -> int:
    return _count_cuda() if kind == "cuda" else len([*Path("/dev").glob("davinci[0-9]*")])


def _count_cuda() -> int:
    """Lines `GPU 0: …` of `nvidia-smi -L`; 0 without that program, or without a driver that works."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COUNT_TIMEOUT_S
        )
    except FileNotFoundError:
        return 0
    except subprocess.TimeoutExpired:
        raise OSError(f"`nvidia-smi -L` gave no answer in {_COUNT_TIMEOUT_S:.0f} s: see to the driver") from None
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0
