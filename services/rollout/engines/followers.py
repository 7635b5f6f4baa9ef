"""Followers: processes on the further devices of a replica that splits each sample over several, and their orders.

A follower holds the transformers and executes rank 0's orders in sequence: loads, takes weights, and runs each forward
that rank 0 runs. It decides nothing, so all ranks are always alike. Orders come by a pipe, which may be silent for any
time. They are pickled, because only these processes write to it. Tensors come by the group's collectives.

A follower answers every failure outside a collective. A rank that fails inside one leaves the others waiting. Then the
replica answers its caller and ends as a whole, and its supervisor restarts it. It ends at once when a rank dies.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flowfleet.errors import DataLoss
from flowfleet.hardware import devices
from flowfleet.models.sequence_parallel import mesh_of
from flowfleet.weights.transfer import TransferStore

FLAG: Final = "--sequence-parallel-size"
HOST: Final = "127.0.0.1"
_END_S: Final = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The first message to a follower."""

    rank: int
    size: int
    device: str
    store_port: int
    timeout_s: float
    max_batch: int
    threads: int | None
    log_level: int


@dataclass(frozen=True)
class Load:
    """Answered. Loads the transformers of a model."""

    model: bytes
    """A ModelSpec."""


@dataclass(frozen=True)
class Install:
    """Answered. Installs an adapter of that shape in place of any other."""

    lora: bytes | None
    """A LoraSpec."""


@dataclass(frozen=True)
class Verify:
    """Answered. Compares the live weights with the trainer's hashes, and derives from them what is derived."""

    hashes: Mapping[str, int]


@dataclass(frozen=True)
class Share:
    """Takes all weights that an update brings from rank 0."""


@dataclass(frozen=True)
class Forward:
    """Runs a forward whose tensors rank 0 sends."""

    component: str
    tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    """Arguments that are tensors, in the order in which they are sent."""
    others: Mapping[str, Any]
    without_lora: bool
    full_precision: bool


Answer = tuple[type[Exception], str] | None
"""Error of a follower, as a type that rank 0 can raise and a message; None if all went well."""


@dataclass(frozen=True)
class Failed:
    """Last words of a follower that failed inside a collective. It waits for its end: leaving would break the
    collective on the other ranks, whose errors would hide its own."""

    why: str


class Followers:
    """The processes of ranks 1 to `size` - 1. `timeout_s` is the longest wait for another rank, which may compile
    meanwhile. `on_failed` gets the reason why a follower can do nothing more; `on_died` is called when one has ended.
    Both are called from threads of their own.

    Make it in the thread that lives as long as the process, with whose end followers end too.
    """

    def __init__(
        self,
        device: torch.device,
        size: int,
        *,
        max_batch: int,
        threads: int | None,
        timeout_s: float,
        on_failed: Callable[[str], None],
        on_died: Callable[[], None],
    ) -> None:
        self._device, self._size = device, size
        self._on_failed, self._on_died = on_failed, on_died
        self._closing = self._have_met = False
        self._timeout = timedelta(seconds=timeout_s)
        self._store = TransferStore(HOST, timeout_s)
        self._pipes: list[Connection[Any, Any]] = []
        self._answers: list[queue.SimpleQueue[Answer]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        level = logging.getLogger().level
        for rank in range(1, size):
            is_other = devices.is_accelerator(device)
            device_name = f"{device.type}:{(device.index or 0) + rank}" if is_other else str(device)
            self._start(Settings(rank, size, device_name, self._store.port, timeout_s, max_batch, threads, level))

    def meet(self) -> DeviceMesh:
        """The group of all ranks; waits until the followers are up."""
        mesh = meet(self._store.store, 0, self._size, self._device, self._timeout)
        self._have_met = True
        return mesh

    def order(self, order: Load | Install | Verify | Share | Forward) -> None:
        for pipe in self._pipes:
            pipe.send(order)

    def answers(self) -> list[Answer]:
        """Waits for all."""
        return [answers.get() for answers in self._answers]

    def close(self) -> None:
        """Ends the followers once they have done what they were ordered; before they have met they take no order."""
        self._closing = True
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if self._have_met:
                with suppress(OSError):
                    pipe.send(None)
            else:
                process.kill()
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, settings: Settings) -> None:
        ours, theirs = multiprocessing.Pipe()
        argv = [sys.executable, "-m", "services.rollout.engines.follower", str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        ours.send(settings)
        answers = queue.SimpleQueue[Answer]()
        self._pipes.append(ours)
        self._answers.append(answers)
        self._processes.append(process)
        given = (settings.rank, process, ours, answers)
        threading.Thread(target=self._listen, args=given, name="follower", daemon=True).start()

    def _listen(
        self,
        rank: int,
        process: subprocess.Popen[bytes],
        pipe: Connection[Any, Any],
        answers: queue.SimpleQueue[Answer],
    ) -> None:
        with suppress(EOFError, OSError):
            while True:
                said: Answer | Failed = pipe.recv()
                if isinstance(said, Failed):
                    self._on_failed(f"rank {rank} of this replica: {said.why}")
                else:
                    answers.put(said)
        code = process.wait()
        if not self._closing:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            log.error("rank %d of this replica ended with %s; the replica ends", rank, how)
            self._on_died()


def require_devices(device: torch.device, size: int) -> None:
    """Raises ValueError where this process sees too few accelerators from `device` on."""
    if devices.is_accelerator(device) and (device.index or 0) + size > (count := devices.count(device)):
        raise ValueError(f"{FLAG} {size} needs {size} accelerators from {device} on, but this process sees {count}")


def answer_of(error: Exception) -> Answer:
    """Returns the error that rank 0 raises for an error of a follower."""
    kind = next((kind for kind in (DataLoss, ValueError) if isinstance(error, kind)), RuntimeError)
    return kind, str(error) or repr(error)


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Sends rank 0's values to all, or takes them."""
    for tensor in tensors:
        dist.broadcast(tensor.detach().view(torch.uint8) if tensor.dim() else tensor.detach(), 0)


def meet(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> DeviceMesh:
    """Makes torch's default group of the ranks that share samples. Blocks until all have come."""
    devices.bind(device)
    devices.synchronize(device)  # a mesh chooses a device for a thread that has used none
    dist.init_process_group(devices.backend(device), store=store, rank=rank, world_size=size, timeout=timeout)
    return mesh_of(device.type, size, size)
