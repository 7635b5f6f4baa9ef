"""How waits of a transfer group end: by the deadline, by being given up, by leaving."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from flowfleet.proto.rollout_pb2 import TransferGroup
from flowfleet.weights import weights
from flowfleet.weights.transfer import GroupBroken, TransferError, TransferMember, TransferStore
from tests.filling import filling

CPU = torch.device("cpu")
TIMEOUT_S = 20.0


def group_of(store: TransferStore, rank: int, size: int = 2) -> TransferGroup:
    return TransferGroup(
        group_id="g",
        backend="gloo",
        store_host=store.host,
        store_port=store.port,
        rank=rank,
        world_size=size,
        timeout_s=TIMEOUT_S,
    )


def join_both(store: TransferStore) -> tuple[TransferMember, TransferMember]:
    """Sender and receiver in one process."""
    others: list[TransferMember] = []
    thread = threading.Thread(target=lambda: others.append(TransferMember.join(group_of(store, 1), CPU)))
    thread.start()
    member = TransferMember.join(group_of(store, 0), CPU, store)
    thread.join()
    return member, others[0]


def test_a_join_names_who_is_missing_and_ends_when_given_up() -> None:
    store = TransferStore("127.0.0.1", TIMEOUT_S)
    given_up = threading.Event()
    threading.Timer(0.3, given_up.set).start()
    start = time.monotonic()
    with pytest.raises(GroupBroken, match=r"ranks \[1, 2\] of 3 have not come: given up") as caught:
        TransferMember.join(group_of(store, 0, size=3), CPU, store, given_up.is_set)
    assert caught.value.missing == (1, 2)
    assert time.monotonic() - start < TIMEOUT_S / 4


def test_leaving_ends_a_wait_at_once_and_another_group_can_be_formed() -> None:
    store = TransferStore("127.0.0.1", TIMEOUT_S)
    sender, receiver = join_both(store)
    threading.Timer(0.3, receiver.abort).start()
    start = time.monotonic()
    tensors = {"a": torch.arange(5.0)}
    buckets = weights.make_buckets(weights.specs_of(tensors))
    with pytest.raises(RuntimeError, match="was left"):
        weights.receive(receiver, buckets, weights.copy_into({"a": torch.zeros(5)}))
    assert time.monotonic() - start < TIMEOUT_S / 4
    with pytest.raises(RuntimeError, match="was left"):
        receiver.broadcast(torch.zeros(1))
    sender.abort()
    sender.abort()  # once more changes nothing

    sender, receiver = join_both(TransferStore("127.0.0.1", TIMEOUT_S))
    target = torch.zeros(5)
    thread = threading.Thread(target=weights.receive, args=(receiver, buckets, weights.copy_into({"a": target})))
    thread.start()
    sent = weights.send(sender, buckets, filling(tensors))
    thread.join()
    assert weights.verify({"a": target}, sent.hashes) == weights.digest(weights.tensor_hashes(tensors.items()))


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (RuntimeError("Connection closed by peer"), GroupBroken),
        (RuntimeError("ncclRemoteError: A call failed possibly due to a network error"), GroupBroken),
        (RuntimeError("ncclSystemError: System call (e.g. socket, malloc) failed"), TransferError),
        (torch.OutOfMemoryError("too little memory"), TransferError),
    ],
)
def test_a_backends_errors_are_told_apart(
    failure: Exception, told: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise failure

    sender, receiver = join_both(TransferStore("127.0.0.1", TIMEOUT_S))
    group = SimpleNamespace(broadcast=fail, abort=lambda: None)
    monkeypatch.setattr(receiver, "_process_group", group)
    with pytest.raises(TransferError, match=str(failure)[:20]) as caught:
        receiver.broadcast(torch.zeros(1, dtype=torch.uint8))
    assert type(caught.value) is told
    sender.abort()
