"""The ranks of one trainer: their process group, and how they agree.

Collectives of the model run on the device's backend. Commands and agreement run on a Gloo group of their own, whose
wait for the next command has no practical limit: a paused job may be silent for days. Nothing here pickles.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from errno import EDQUOT, ENOSPC
from typing import Any

import redis.exceptions
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from flowfleet import errors
from flowfleet.hardware import devices
from flowfleet.process.service import is_loopback
from flowfleet.redis.trouble import trouble
from flowfleet.rewards.failures import RewardRefused, RewardUnavailable
from services.trainer.beats import Beats, Phase

_FOREVER = timedelta(days=365)
_MESSAGE_BYTES = 2048
_KINDS: tuple[type[errors.FlowfleetError], ...] = (
    RewardRefused,
    RewardUnavailable,
    errors.InvalidRequest,
    errors.NotFound,
    errors.Conflict,
    errors.TooLarge,
    errors.Unavailable,
    errors.DataLoss,
    errors.Full,
    errors.OtherFormat,
)
"""Kinds of errors that one rank can send to another; a subclass comes before its base."""
_OTHER = _KINDS.index(errors.InvalidRequest)
"""Kind that the other ranks raise for an error whose own kind is not in `_KINDS`."""
_BETWEEN = "\x1f"
"""Separates an error's further fields from its message, which comes last and may be cut."""


class Ranks:
    """This rank among all. A world of one makes every method free."""

    def __init__(self) -> None:
        """Joins the group that the environment names, or makes a world of one."""
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = devices.pick_device(int(os.environ.get("LOCAL_RANK", "0")))
        devices.tell_start()
        self._init_process_group()
        self.control: Any = dist.new_group(backend="gloo", timeout=_FOREVER) if self.world_size > 1 else None
        self.beats = Beats(self.rank, self.world_size)
        self.beats.carry()

    def close(self) -> None:
        self.beats.close()
        dist.destroy_process_group()

    def connect(self) -> None:
        """Collective. Makes the accelerators' communicator, which takes long for many ranks."""
        if self.world_size > 1 and devices.is_accelerator(self.device):
            with self.beats.phase(Phase.CONNECT):
                dist.all_reduce(torch.zeros(1, device=self.device))
                devices.synchronize(self.device)
            devices.tell_transport(devices.backend(self.device))

    def broadcast(self, data: bytes = b"") -> bytes:
        """Rank 0's bytes, on every rank. Raises RuntimeError when rank 0 is gone."""
        if self.world_size == 1:
            return data
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group=self.control)
        payload = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        if self.rank != 0:
            payload = torch.empty(max(1, int(size)), dtype=torch.uint8)
        dist.broadcast(payload, 0, group=self.control)
        return bytes(payload.numpy())[: int(size)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Barrier that every rank must reach before any continues: one rank's failure is raised on all.

        Only failures that leave the trainer unharmed belong inside: the project's errors, ValueError, OSError and those
        of Redis. Any other exception passes through and ends the process.
        """
        failure: errors.FlowfleetError | None = None
        try:
            yield
        except errors.FlowfleetError as error:
            failure = error
        except ValueError as error:
            failure = errors.InvalidRequest(str(error))
        except redis.exceptions.RedisError as error:
            failure = errors.Unavailable(trouble(error) or f"{type(error).__name__}: {error}")
        except OSError as error:
            kind = errors.Full if getattr(error, "errno", 0) in (ENOSPC, EDQUOT) else errors.Unavailable
            failure = kind(f"{type(error).__name__}: {error}")
        self._agree(failure)

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise over ranks; a CPU tensor, equal on every rank."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Element-wise over ranks; a CPU tensor, equal on every rank."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        result = values.detach().cpu().clone()
        if self.world_size > 1:
            dist.all_reduce(result, operation, group=self.control)
        return result

    def _agree(self, failure: errors.FlowfleetError | None) -> None:
        if self.world_size == 1:
            if failure is not None:
                raise failure
            return
        packed = _pack(failure)
        gathered = [torch.empty_like(packed) for _ in range(self.world_size)]
        dist.all_gather(gathered, packed, group=self.control)
        for rank, other in enumerate(gathered):
            if int(other[0]):
                raise failure if failure is not None and rank == self.rank else _unpack(other)

    def _init_process_group(self) -> None:
        backend = devices.backend(self.device)
        backends = "gloo" if backend == "gloo" else f"cpu:gloo,{self.device.type}:{backend}"
        if self.world_size == 1:
            dist.init_process_group(backends, store=HashStore(), rank=0, world_size=1)
            return
        if is_loopback(os.environ.get("MASTER_ADDR", "")):
            names = [name for _, name in socket.if_nameindex()]
            loopback = next((name for name in names if name in ("lo", "lo0")), names[0])
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        dist.init_process_group(backends)


def _pack(failure: errors.FlowfleetError | None) -> Tensor:
    """Packs a failure as (_MESSAGE_BYTES,) uint8: kind (0: no failure), then its further fields and its message in
    UTF-8, padded with zeros."""
    packed = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    if failure is not None:
        kind = next((number for number, kind in enumerate(_KINDS) if isinstance(failure, kind)), _OTHER)
        parts = [*map(str, failure.args[1:]), str(failure)]
        text = _BETWEEN.join(part.replace(_BETWEEN, " ") for part in parts)
        message = bytes([1 + kind]) + text.encode()[: _MESSAGE_BYTES - 1]
        packed[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    return packed


def _unpack(packed: Tensor) -> errors.FlowfleetError:
    data = bytes(packed.numpy())
    *more, message = data[1:].rstrip(b"\0").decode(errors="replace").split(_BETWEEN)
    return _KINDS[data[0] - 1](message, *more)
