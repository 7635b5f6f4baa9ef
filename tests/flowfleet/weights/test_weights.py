"""Hashes against a NumPy oracle, buckets, and a broadcast between real processes."""

import multiprocessing
import socket
import time

import numpy as np
import pytest
import torch

from flowfleet.errors import DataLoss
from flowfleet.proto.rollout_pb2 import Bucket, TransferGroup
from flowfleet.weights import hashing, weights
from flowfleet.weights.transfer import TransferMember, TransferStore
from tests.filling import filling

GOLDEN = 0x9E3779B97F4A7C15


def content_sum(data: bytes) -> int:
    """The content part of the hash as its docstring states it, in unsigned NumPy."""
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype="<u8")
    with np.errstate(over="ignore"):
        z = words + np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))


def tensor_hash(tensor: torch.Tensor) -> int:
    return weights.tensor_hashes([("", tensor)])[""]


@pytest.mark.parametrize("size", [0, 1, 2, 7, 1000, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hash_equals_the_numpy_oracle(size: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    empty = tensor_hash(torch.empty(0, dtype=dtype))
    head = (tensor_hash(tensor) - content_sum(tensor.view(torch.uint8).numpy().tobytes())) % 2**64
    assert size > 0 or head == empty
    assert head == (tensor_hash(torch.zeros(size, dtype=dtype)) - content_sum(bytes(size * dtype.itemsize))) % 2**64


def test_hash_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(5000)
    whole = tensor_hash(tensor)
    monkeypatch.setattr(hashing, "_CHUNK_WORDS", 17)
    assert tensor_hash(tensor) == whole


def test_hash_sees_order_signs_shape_and_dtype() -> None:
    base = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    swapped = base[[1, 0, 2, 3, 4, 5]]
    far = base[[4, 1, 2, 3, 0, 5]]
    two_signs = base * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    variants = [base, swapped, far, two_signs, base.reshape(2, 3), base.reshape(3, 2), base.view(torch.int32)]
    assert len({tensor_hash(variant) for variant in variants}) == len(variants)
    assert tensor_hash(base[::2]) == tensor_hash(torch.tensor([1.0, 3.0, 5.0]))
    assert tensor_hash(base[1:4]) == tensor_hash(torch.tensor([2.0, 3.0, 4.0]))


def test_digest_ignores_order_and_sees_names() -> None:
    hashes = {"a": 1, "b": 2}
    assert weights.digest(hashes) == weights.digest({"b": 2, "a": 1})
    assert weights.digest(hashes) != weights.digest({"a": 2, "b": 1})


def test_verify_names_what_differs() -> None:
    good = {"a": torch.ones(3), "b": torch.zeros(2)}
    hashes = weights.tensor_hashes(good.items())
    assert weights.verify(good, hashes) == weights.digest(hashes)
    with pytest.raises(DataLoss, match=r"1 of 2 parameters.* b "):
        weights.verify({**good, "b": torch.ones(2)}, hashes)
    with pytest.raises(DataLoss, match=r"not loaded \['b'\]"):
        weights.verify({"a": good["a"]}, hashes)


def test_buckets_keep_order_and_limit() -> None:
    tensors = {f"p{i}": torch.empty(size) for i, size in enumerate([10, 20, 300, 5, 5])}
    buckets = weights.make_buckets(weights.specs_of(tensors, torch.bfloat16), bucket_bytes=128)
    assert [[spec.name for spec in bucket.parameters] for bucket in buckets] == [["p0", "p1"], ["p2"], ["p3", "p4"]]
    assert {spec.dtype for bucket in buckets for spec in bucket.parameters} == {"bfloat16"}
    with pytest.raises(ValueError, match="complex64"):
        weights.dtype_of("complex64")


def test_copy_into_refuses_what_does_not_fit() -> None:
    into = weights.copy_into({"a": torch.zeros(2)})
    with pytest.raises(ValueError, match="no parameter b"):
        into("b", torch.zeros(2))
    with pytest.raises(ValueError, match=r"\[2\] here and float32 \[3\]"):
        into("a", torch.zeros(3))


def make_parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"w": (33, 7), "scalar": (), "bias": (5,), "big": (400, 3)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**tensors, "half": torch.randn(9, generator=generator).bfloat16()}


def group_proto(store: TransferStore, rank: int, size: int, timeout_s: float) -> TransferGroup:
    return TransferGroup(
        group_id=f"g{size}",
        backend="gloo",
        store_host=store.host,
        store_port=store.port,
        rank=rank,
        world_size=size,
        timeout_s=timeout_s,
    )


def receiver(group_bytes: bytes, buckets: list[bytes], results: "multiprocessing.Queue[object]") -> None:
    member = TransferMember.join(TransferGroup.FromString(group_bytes), torch.device("cpu"))
    got: dict[str, torch.Tensor] = {}
    weights.receive(
        member, [Bucket.FromString(data) for data in buckets], lambda name, value: got.update({name: value.clone()})
    )
    results.put(weights.tensor_hashes(got.items()))


def test_broadcast_to_two_processes_is_bitwise_equal() -> None:
    parameters = make_parameters()
    buckets = weights.make_buckets(weights.specs_of(parameters), bucket_bytes=1024)
    assert len(buckets) > 2
    store = TransferStore("127.0.0.1", 20)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([receiver.__module__])
    results = context.Queue()
    packed = [bucket.SerializeToString() for bucket in buckets]
    workers = [
        context.Process(target=receiver, args=(group_proto(store, rank, 3, 20).SerializeToString(), packed, results))
        for rank in (1, 2)
    ]
    for worker in workers:
        worker.start()
    member = TransferMember.join(group_proto(store, 0, 3, 20), torch.device("cpu"), store)
    sent = weights.send(member, buckets, filling(parameters))
    assert sent.bytes >= sum(tensor.numel() * tensor.element_size() for tensor in parameters.values())
    assert sent.hashes == weights.tensor_hashes(parameters.items())
    for _ in workers:
        assert results.get(timeout=20) == weights.tensor_hashes(parameters.items())
    for worker in workers:
        worker.join(20)
    member.close()


def test_an_absent_member_ends_the_join_in_bounded_time() -> None:
    store = TransferStore("127.0.0.1", 1.0)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        TransferMember.join(group_proto(store, 0, 2, 1.0), torch.device("cpu"), store)
    assert time.monotonic() - start < 5


def test_the_store_listens_on_its_host_alone() -> None:
    store = TransferStore("127.0.0.1", 1.0)
    with socket.create_connection(("127.0.0.1", store.port), timeout=1):
        pass
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", store.port), timeout=1):
        pass
