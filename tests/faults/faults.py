"""How each kind of fault is done, and how it ends. One function a kind; each raises Missed where nothing is hit.

A function strikes at once and returns what it did. `heal`, where there is one, ends a fault that lasts; `replaced` is a
process that the system must replace by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis

from flowfleet.proto.common_pb2 import Sample
from flowfleet.redis import keys
from tests.faults.schedule import Fault
from tests.faults.targets import Missed, Targets, is_live
from tests.faults.tools.control import Control
from tests.faults.tools.proxy import Loss, TcpProxy

AOF_LOSS_S = (1.0, 2.0)
"""What an append-only file loses of its end."""
SKEW_S = 3600
HEADER_BYTES = 8
"""Size of a safetensors file's length field."""


@dataclass
class Struck:
    """What a fault did."""

    what: str
    heal: Callable[[], None] | None = None
    replaced: psutil.Process | None = None
    wake: Callable[[], None] | None = None
    """Ends a process that the job no longer needs."""
    data: dict[str, Any] = field(default_factory=dict)


def kill(targets: Targets, fault: Fault) -> Struck:
    """SIGKILL."""
    process = targets.process(fault.target, fault.dice)
    name = _named(targets, fault, process)
    _signal(process, signal.SIGKILL)
    return Struck(f"SIGKILL of {name}")


def stop(targets: Targets, fault: Fault) -> Struck:
    """SIGSTOP, and SIGCONT after a while."""
    process = targets.process(fault.target, fault.dice)
    _signal(process, signal.SIGSTOP)
    return Struck(f"SIGSTOP of {_named(targets, fault, process)} for {fault.seconds:g} s", lambda: _resume(process))


def hang(targets: Targets, fault: Fault) -> Struck:
    """Stops the process for good (SIGSTOP): the system must detect this and replace it, or continue without it."""
    process = targets.process(fault.target, fault.dice)
    _signal(process, signal.SIGSTOP)
    what = f"SIGSTOP of {_named(targets, fault, process)} for good"
    if fault.target == "trainer-agent":  # its ranks work without it
        return Struck(f"{what}, until the job had finished a step", wake=lambda: _resume(process))
    return Struck(what, replaced=process)


def cut_network(targets: Targets, fault: Fault) -> Struck:
    """Loses the network between two processes for a while, silently or by reset."""
    link, _, how = fault.target.partition("/")
    name, proxy = _proxy(targets, link, fault.dice)
    loss: Loss = "reset" if how == "reset" else "silent"
    proxy.lose(loss)
    return Struck(f"no network ({loss}) on {name} for {fault.seconds:g} s", proxy.restore)


def cut_aof(targets: Targets, fault: Fault) -> Struck:
    """Kills Redis and cuts off what it wrote last, as a power cut does; the supervisor starts it again."""
    name, process = targets.service("redis", fault.dice)
    seconds = AOF_LOSS_S[0] + fault.dice * (AOF_LOSS_S[1] - AOF_LOSS_S[0])
    _signal(process, signal.SIGSTOP)  # it writes nothing between the cut and its end
    found = targets.aof_size_before(seconds)
    if found is None:
        _resume(process)
        raise Missed(f"the append-only file is younger than {seconds:.1f} s")
    path, size = found
    lost = path.stat().st_size - size
    if lost <= 0:
        _resume(process)
        raise Missed("the append-only file has not grown")
    os.truncate(path, size)
    targets.aof_sizes.clear()
    _signal(process, signal.SIGKILL)
    return Struck(f"SIGKILL of {name} and {lost} bytes ({seconds:.1f} s) cut off {path.name}", data={"bytes": lost})


def flip_checkpoint(targets: Targets, fault: Fault) -> Struck:
    """Flips a bit in the newest checkpoint, then kills a rank so that the trainer must read it."""
    found = targets.checkpoints()
    if len(found) < 2:
        raise Missed("there are less than two checkpoints")
    process = targets.process("trainer-rank", fault.dice)
    files = sorted(found[-1].glob("*.safetensors"))
    if not files:
        raise Missed(f"{found[-1].name} has no tensors")
    file = files[int(fault.dice * len(files))]
    start = HEADER_BYTES + int.from_bytes(file.read_bytes()[:HEADER_BYTES], "little")
    at = _flip(file, start, fault.dice)
    _signal(process, signal.SIGKILL)
    return Struck(f"a bit flipped at byte {at} of {found[-1].name}/{file.name}, SIGKILL of trainer-rank")


def flip_blob(targets: Targets, fault: Fault) -> Struck:
    """Flips a bit of what a sample of the running step has stored, before the trainer reads it."""
    step = targets.watch.now.step
    with targets.redis() as client:
        rows = client.hgetall(keys.sample_refs(targets.job_id, step))
        if not rows:
            raise Missed(f"step {step} has stored nothing yet")
        names = sorted(rows)
        name = names[int(fault.dice * len(names))]
        ref = getattr(Sample.FromString(rows[name]), fault.target)
        key = ref.uri.removeprefix("redis:")
        at = int(fault.dice * ref.size_bytes)
        byte = client.getrange(key, at, at)
        if not byte:
            raise Missed(f"the {fault.target} of {step}/{name.decode()} is gone")
        client.setrange(key, at, bytes([byte[0] ^ 1]))
        if client.exists(keys.train_request(targets.job_id, step)):
            client.setrange(key, at, byte)
            raise Missed(f"the trainer may have read the blobs of step {step} already")
    sample = f"{step}/{name.decode()}"
    return Struck(f"a bit flipped at byte {at} of the {fault.target} of {sample}", data={"sample": sample})


def full_disk(targets: Targets, fault: Fault) -> Struck:
    """Fills the disk that has the checkpoints."""
    disk = targets.chaos.disk
    if not disk.mounted:
        raise Missed("the checkpoints have no disk of their own")
    num_bytes = disk.fill()
    return Struck(f"the disk of the checkpoints full for {fault.seconds:g} s ({num_bytes} bytes taken)", disk.free)


def full_redis(targets: Targets, fault: Fault) -> Struck:
    """Leaves Redis no memory beyond what it uses."""
    with targets.redis() as client:
        before = client.config_get("maxmemory")["maxmemory"]
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory", used)

    def heal() -> None:
        _patiently(lambda: _set_memory(targets, before))

    return Struck(f"maxmemory {used} of Redis for {fault.seconds:g} s", heal)


def skew_clock(targets: Targets, fault: Fault) -> Struck:
    """Sets the clock of one process an hour ahead or behind for a while."""
    target, _, way = fault.target.partition("/")
    name, _process = targets.service(target, fault.dice)
    clocks = targets.chaos.clocks
    if not clocks.has(name):  # a rollout that takes broadcasts
        name, _process = targets.service("controller", fault.dice)
    clocks.set(name, f"{'+' if way == 'ahead' else '-'}{SKEW_S}")
    return Struck(f"clock of {name} {SKEW_S} s {way} for {fault.seconds:g} s", lambda: clocks.right(name))


def slow_reward(targets: Targets, fault: Fault) -> Struck:
    """Makes the reward slow, silent, unavailable or talk rubbish for a while."""
    targets.process("reward", fault.dice)
    file = targets.chaos.control_file
    usual = Control.read(file)
    Control(usual.poison, fault.target).write(file)
    return Struck(f"reward {fault.target} for {fault.seconds:g} s", lambda: Control(usual.poison).write(file))


def poison_reward(targets: Targets, fault: Fault) -> Struck:
    """Nothing more to do: the control file has the sample from the start, so that a repeated call gives the same."""
    return Struck(f"reward answers {fault.target} for {fault.sample}", data={"sample": fault.sample})


STRIKES: dict[str, Callable[[Targets, Fault], Struck]] = {
    "kill": kill,
    "stop": stop,
    "hang": hang,
    "cut-network": cut_network,
    "cut-aof": cut_aof,
    "flip-checkpoint": flip_checkpoint,
    "flip-blob": flip_blob,
    "full-disk": full_disk,
    "full-redis": full_redis,
    "skew-clock": skew_clock,
    "slow-reward": slow_reward,
    "poison-reward": poison_reward,
}


def _named(targets: Targets, fault: Fault, process: psutil.Process) -> str:
    name = fault.target if fault.target.startswith("trainer") else targets.name(process.pid)
    return f"{name} (pid {process.pid})"


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        raise Missed(f"process {process.pid} has just ended") from None


def _resume(process: psutil.Process) -> None:
    """SIGCONT to what may have been replaced meanwhile."""
    if process.is_running():
        process.send_signal(signal.SIGCONT)


def _proxy(targets: Targets, link: str, dice: float) -> tuple[str, TcpProxy]:
    """The proxy of a link. A rollout's is chosen among the rollouts'; a trainer without its own URL has its
    controller's."""
    kinds = link.split("-")
    found = {
        name: proxy for name, proxy in sorted(targets.chaos.proxies.items()) if all(kind in name for kind in kinds)
    }
    if not found and link == "trainer-redis":
        return _proxy(targets, "controller-redis", dice)
    name = list(found)[int(dice * len(found))]
    for kind in kinds:
        if kind not in ("trainer", "rollout") and not is_live(targets.process(kind, 0.0)):
            raise Missed(f"no live {kind}")
    return name, found[name]


def _flip(file: Path, start: int, dice: float) -> int:
    """Flips a bit behind `start`; returns which byte."""
    with file.open("r+b") as opened:
        size = file.stat().st_size
        at = start + int(dice * (size - start))
        opened.seek(at)
        byte = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 1]))
    return at


def _set_memory(targets: Targets, value: Any) -> None:
    with targets.redis() as client:
        client.config_set("maxmemory", value)


def _patiently(act: Callable[[], None], tries: int = 40) -> None:
    """Repeats what Redis does not answer: another fault may have struck it meanwhile."""
    for _ in range(tries):
        with contextlib.suppress(redis.RedisError):
            act()
            return
        time.sleep(0.5)
    act()
