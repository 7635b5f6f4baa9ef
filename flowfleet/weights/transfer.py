"""Transfer group over which weights travel: trainer rank 0 and the live replicas.

It is a store and a process group of its own, never torch's default group: a replica that dies takes down this group
only, and the trainer makes another without it. Every wait is bounded by the group's `timeout_s`, and ends at once when
any thread leaves the group. Otherwise a device backend would wait for a dead peer until the deadline.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Store, TCPStore

from flowfleet.hardware import devices
from flowfleet.process.service import is_loopback
from flowfleet.proto.rollout_pb2 import TransferGroup

_POLL_S = 0.0002
_MEET_POLL_S = 0.01
_CLOSE_S = 5.0
_OWN_FAULT = re.compile(r"nccl(UnhandledCuda|System|Internal)Error|ncclInvalid|Cannot resolve")
"""In an error's text: it arose on this host. `ncclRemoteError` and a connection that ends are other members' doing."""

log = logging.getLogger(__name__)


class TransferError(RuntimeError):
    """A group cannot be used, by a fault of this member's own device or host unless it is a `GroupBroken`."""


class GroupBroken(TransferError):
    """Another member broke the group: it failed, never joined, or left. `missing`: ranks that never joined."""

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class TransferStore:
    """The trainer's TCPStore for all its groups, listening on `host` alone, on a free port of its own choice."""

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
    """Member of a transfer group: one of its ranks. Rank 0 sends, the others receive."""

    def __init__(self, group: TransferGroup, device: torch.device, process_group: Any) -> None:
        self.group_id = group.group_id
        self.device = device if group.backend == devices.backend(device) else torch.device("cpu")
        """Device on which tensors must lie to be broadcast: with Gloo the host's memory, whichever device computes."""
        self.timeout_s = group.timeout_s
        self._backend = group.backend
        self._process_group = process_group
        self._leaving: threading.Thread | None = None

    @classmethod
    def join(
        cls,
        group: TransferGroup,
        device: torch.device,
        store: TransferStore | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> TransferMember:
        """Blocks until every rank has joined and can be reached, or `given_up` says to stop.

        The trainer passes its own `store`, a replica connects to it. Raises GroupBroken when a member does not come
        within `group.timeout_s` or fails, or when it was given up; another RuntimeError, such as TransferError, when
        the fault is this member's own: it cannot reach the store, or its device cannot communicate.
        """
        timeout = timedelta(seconds=group.timeout_s)
        deadline = time.monotonic() + group.timeout_s
        base = store.store if store else TCPStore(group.store_host, group.store_port, timeout=timeout)
        shared = PrefixStore(group.group_id, base)
        _meet(shared, group, deadline, given_up)
        with _explained(group.group_id):
            process_group = devices.new_process_group(
                group.backend, shared, group.rank, group.world_size, timeout, loopback=is_loopback(group.store_host)
            )
        member = cls(group, device, process_group)
        try:
            member._connect(deadline, given_up)
        except BaseException:
            member.abort()
            raise
        return member

    def broadcast(self, flat: Tensor) -> Transfer:
        """Starts the broadcast of a flat tensor from rank 0, behind what the current stream holds.

        It and `.wait()` on the result raise TransferError on failure, GroupBroken once the group was left.
        """
        process_group = self._process_group
        if process_group is None:
            raise self._left()
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        with self._explained():
            return Transfer(process_group.broadcast([flat], options), flat, self)

    def abort(self) -> None:
        """Leaves the group at once, from any thread: running transfers fail, here and for the others."""
        process_group, self._process_group = [self._process_group], None
        if process_group[0] is None:
            return
        # The group's end can take until a stuck peer's deadline, so a thread of its own sees to it.
        self._leaving = threading.Thread(target=_end, args=(self._backend, process_group), name="leave", daemon=True)
        self._leaving.start()

    def close(self) -> None:
        """Leaves the group and waits a little for its end, as a process that is about to end should."""
        self.abort()
        if self._leaving is not None:
            self._leaving.join(_CLOSE_S)

    def finish(self, work: Any) -> None:
        """Waits on the host until a broadcast is done, so that a late or dead peer never hangs the device's stream."""
        deadline = time.monotonic() + self.timeout_s
        with self._explained():
            while not work.is_completed():
                if self._process_group is None:
                    raise self._left()
                if time.monotonic() > deadline:
                    self.abort()
                    raise GroupBroken(f"transfer group {self.group_id}: no answer within {self.timeout_s:.0f} s")
                time.sleep(_POLL_S)
            if self._process_group is None:
                raise self._left()  # what was aborted counts as completed as well
            work.wait(timedelta(seconds=self.timeout_s))

    def _connect(self, deadline: float, given_up: Callable[[], bool]) -> None:
        """Broadcasts a first byte, in which NCCL and HCCL make their communicator. A peer that has just died would
        block that for ever: then the waiting thread is left behind."""
        device, done = self.device, Future[None]()

        def first() -> None:
            try:
                devices.bind(device)
                self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device)).wait()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=first, name="connect", daemon=True).start()
        while not done.done():
            _check_wait(self.group_id, deadline, given_up)
            time.sleep(_POLL_S)
        done.result()
        devices.tell_transport(self._backend)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            with _explained(self.group_id):
                yield
        except TransferError as error:
            if self._process_group is None and not isinstance(error, GroupBroken):
                raise self._left() from error
            raise

    def _left(self) -> GroupBroken:
        return GroupBroken(f"transfer group {self.group_id} was left")


class Transfer:
    """A running broadcast. It keeps the buffer alive until it is waited for."""

    def __init__(self, work: Any, flat: Tensor, member: TransferMember) -> None:
        self._work, self._flat, self._member = work, flat, member

    def wait(self) -> None:
        """Afterwards the buffer may be read or written on the current stream."""
        self._member.finish(self._work)


def _meet(store: Store, group: TransferGroup, deadline: float, given_up: Callable[[], bool]) -> None:
    """Waits until all ranks have said in the store that they are there."""
    store.set(f"here/{group.rank}", "1")
    missing = list(range(group.world_size))
    while missing := [rank for rank in missing if not store.check([f"here/{rank}"])]:
        what = f"{group.group_id}: ranks {missing} of {group.world_size} have not come"
        _check_wait(what, deadline, given_up, missing)
        time.sleep(_MEET_POLL_S)


def _check_wait(what: str, deadline: float, given_up: Callable[[], bool], missing: Sequence[int] = ()) -> None:
    if given_up():
        raise GroupBroken(f"transfer group {what}: given up", missing)
    if time.monotonic() > deadline:
        raise GroupBroken(f"transfer group {what}: not formed in time", missing)


@contextmanager
def _explained(group_id: str) -> Iterator[None]:
    """Turns a backend's error into GroupBroken, or into TransferError where the fault is this member's own."""
    try:
        yield
    except TransferError:
        raise
    except RuntimeError as error:
        is_own = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or _OWN_FAULT.search(str(error))
        raise (TransferError if is_own else GroupBroken)(f"transfer group {group_id}: {error}") from error


def _end(backend: str, process_group: list[Any]) -> None:
    """Takes the last reference out of the list, because the destructor waits too."""
    group = process_group.pop()
    try:
        devices.abort_process_group(backend, group)
    except RuntimeError as error:
        log.warning("transfer group did not end cleanly: %s", error)
