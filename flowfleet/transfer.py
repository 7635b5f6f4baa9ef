"""The group over which full weights travel: trainer rank 0 and the live replicas.

It is a store and a process group of its own, never torch's default group: a replica that dies takes down this group
only, and the trainer makes another without it. Every wait is bounded by the group's `timeout_s`.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, TCPStore

from flowfleet import devices
from flowfleet.proto.rollout_pb2 import TransferGroup


class TransferStore:
    """The trainer's TCPStore for all its groups, listening on `host` alone. Its port is free and found by itself."""

    def __init__(self, host: str, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((host, 0))
        self.host = host
        self.port: int = listener.getsockname()[1]
        self.store = TCPStore(
            host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class TransferMember:
    """One rank of one transfer group. Rank 0 sends, the others receive."""

    def __init__(self, group: TransferGroup, device: torch.device, process_group: Any) -> None:
        self.group_id = group.group_id
        self.device = device
        self.timeout_s = group.timeout_s
        self._polled = group.backend != "gloo"
        self._process_group = process_group

    @classmethod
    def join(cls, group: TransferGroup, device: torch.device, store: TransferStore | None = None) -> TransferMember:
        """Blocks until every rank has joined. The trainer passes its own `store`, a replica connects to it.

        Raises RuntimeError (torch's DistError) when a member does not come within `group.timeout_s`.
        """
        timeout = timedelta(seconds=group.timeout_s)
        base = store.store if store else TCPStore(group.store_host, group.store_port, timeout=timeout)
        process_group = devices.new_process_group(
            group.backend,
            PrefixStore(group.group_id, base),
            group.rank,
            group.world_size,
            timeout,
            loopback=_is_loopback(group.store_host),
        )
        return cls(group, device, process_group)

    def broadcast(self, flat: Tensor) -> Transfer:
        """Starts the broadcast of a flat tensor from rank 0; `.wait()` on the result raises RuntimeError on failure."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return Transfer(self._process_group.broadcast([flat], options), flat, self)

    def close(self) -> None:
        """Leaves the group; waits for nobody."""
        if self._process_group is not None and self._polled:
            self._process_group.abort()
        self._process_group = None

    def finish(self, work: Any, device: torch.device) -> None:
        if self._polled:
            self._poll(work)
            devices.synchronize(device)
        else:
            work.wait(timedelta(seconds=self.timeout_s))

    def _poll(self, work: Any) -> None:
        """On a device backend a late peer would hang the stream: ask until the deadline, then abort the group."""
        deadline = time.monotonic() + self.timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"transfer group {self.group_id}: no answer within {self.timeout_s:.0f} s")
            time.sleep(0.0002)
        work.wait()


class Transfer:
    """A running broadcast. It keeps the buffer alive until it is waited for."""

    def __init__(self, work: Any, flat: Tensor, member: TransferMember) -> None:
        self._work, self._flat, self._member = work, flat, member

    def wait(self) -> None:
        self._member.finish(self._work, self._flat.device)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
