"""Both stores, both worlds: each test runs over every combination, through one synchronous face."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from prometheus_client import CollectorRegistry

from flowfleet.data import blobs
from flowfleet.errors import DataLoss, NotFound
from flowfleet.proto.common_pb2 import BlobRef
from flowfleet.redis import keys
from flowfleet.redis.client import connect, connect_sync

CHUNK = 1000
KEY = keys.blob("job", "trajectory", 0, 1, 2)
SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 7]


class Awaited:
    """A `BlobStore` seen as `SyncBlobs`: each call in an event loop and with a client of its own."""

    def __init__(self, make: Callable[[redis.asyncio.Redis], blobs.BlobStore], url: str) -> None:
        self._make, self._url = make, url

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            async with connect(self._url) as client:
                return await getattr(self._make(client), name)(*args, **kwargs)

        return lambda *args, **kwargs: asyncio.run(call(*args, **kwargs))


def stores(kind: str, redis_url: str, folder: Path) -> Iterator[Any]:
    with connect_sync(redis_url) as client:
        if kind == "redis-sync":
            yield blobs.SyncRedisBlobs(client, CHUNK)
        elif kind == "redis-async":
            yield Awaited(lambda client: blobs.RedisBlobs(client, CHUNK), redis_url)
        elif kind == "file-sync":
            yield blobs.FsspecBlobs(f"file://{folder}/blobs", CHUNK)
        elif kind == "file-async":
            yield Awaited(lambda _: blobs.ThreadedBlobs(blobs.FsspecBlobs(f"file://{folder}/blobs", CHUNK)), redis_url)
        else:
            yield blobs.FsspecBlobs(f"memory://{folder.name}", CHUNK)


@pytest.fixture(params=["redis-sync", "redis-async", "file-sync", "file-async", "memory-sync"])
def store(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[blobs.SyncBlobs]:
    yield from stores(request.param, redis_url, tmp_path)


@pytest.fixture(params=["redis-sync", "redis-async"])
def redis_store(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[blobs.SyncBlobs]:
    yield from stores(request.param, redis_url, tmp_path)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with connect_sync(redis_url) as client:
        yield client


def expected_hash(data: bytes) -> str:
    """The documented rule, written again: plain SHA-256 up to one chunk, else over the chunks' hex digests."""
    if len(data) <= CHUNK:
        return hashlib.sha256(data).hexdigest()
    total = hashlib.sha256()
    for start in range(0, len(data), CHUNK):
        total.update(hashlib.sha256(data[start : start + CHUNK]).hexdigest().encode("ascii"))
    return total.hexdigest()


@pytest.mark.parametrize("size", SIZES)
def test_what_is_put_is_got(store: blobs.SyncBlobs, size: int) -> None:
    data = os.urandom(size)
    ref = store.put(KEY, data, ttl_s=60)
    assert (ref.size_bytes, ref.sha256) == (size, expected_hash(data))
    assert store.get(ref) == data


def test_stores_agree_on_hashes(redis_url: str, tmp_path: Path) -> None:
    data = os.urandom(3 * CHUNK + 1)
    kinds = ["redis-sync", "redis-async", "file-sync", "memory-sync"]
    hashes = {store.put(KEY, data).sha256 for kind in kinds for store in stores(kind, redis_url, tmp_path)}
    assert len(hashes) == 1


@pytest.mark.parametrize("size", [CHUNK, 5 * CHUNK])
def test_deleted_blobs_are_not_found_and_deleting_again_is_fine(store: blobs.SyncBlobs, size: int) -> None:
    first, second = store.put(KEY, bytes(size)), store.put(KEY + "-b", b"kept")
    store.delete([first])
    store.delete([first])
    store.delete([])
    with pytest.raises(NotFound, match="gone"):
        store.get(first)
    assert store.get(second) == b"kept"


@pytest.mark.parametrize("kind", ["redis-async", "file-async", "memory-sync"])
def test_a_prefix_is_deleted_and_its_neighbors_are_not(kind: str, redis_url: str, tmp_path: Path) -> None:
    (store,) = stores(kind, redis_url, tmp_path)
    doomed = [store.put(keys.blob("job", "a", step), bytes(3 * CHUNK)) for step in range(3)]
    kept = store.put(keys.blob("other", "a"), b"kept")
    store.delete_prefix(keys.blob("job"))
    store.delete_prefix(keys.blob("job"))
    for ref in doomed:
        with pytest.raises(NotFound):
            store.get(ref)
    assert store.get(kept) == b"kept"


@pytest.mark.parametrize(("size", "sha256"), [(3, None), (5, None), (4, "0" * 64), (4, "")])
def test_a_reference_that_does_not_match_is_data_loss(store: blobs.SyncBlobs, size: int, sha256: str | None) -> None:
    ref = store.put(KEY, b"1234")
    wrong = BlobRef(uri=ref.uri, size_bytes=size, sha256=ref.sha256 if sha256 is None else sha256)
    with pytest.raises(DataLoss, match="its reference says"):
        store.get(wrong)


def test_overwriting_makes_the_old_reference_data_loss_not_wrong_data(store: blobs.SyncBlobs) -> None:
    old = store.put(KEY, b"old!")
    new = store.put(KEY, b"new!")
    assert store.get(new) == b"new!"
    with pytest.raises(DataLoss):
        store.get(old)


def test_a_flipped_bit_in_any_chunk_is_data_loss(redis_store: blobs.SyncBlobs, client: redis.Redis) -> None:
    ref = redis_store.put(KEY, bytes(3 * CHUNK))
    names = sorted(client.keys(KEY + "*"))
    assert len(names) == 3
    for name in names:
        client.setbit(name, 8 * CHUNK // 2, 1)
        with pytest.raises(DataLoss, match="SHA-256"):
            redis_store.get(ref)
        client.setbit(name, 8 * CHUNK // 2, 0)
    assert redis_store.get(ref) == bytes(3 * CHUNK)


def test_a_lost_chunk_is_not_found(redis_store: blobs.SyncBlobs, client: redis.Redis) -> None:
    ref = redis_store.put(KEY, bytes(3 * CHUNK))
    client.delete(sorted(client.keys(KEY + "*"))[1])
    with pytest.raises(NotFound):
        redis_store.get(ref)
    assert redis_store.renew([ref], 60) == [ref]


@pytest.mark.parametrize("size", [10, 4 * CHUNK])
def test_every_key_expires_unless_renewed(redis_store: blobs.SyncBlobs, client: redis.Redis, size: int) -> None:
    ref = redis_store.put(KEY, bytes(size), ttl_s=100)
    assert all(90 <= client.ttl(name) <= 100 for name in client.keys("*"))
    assert redis_store.renew([ref], 5000) == []
    assert all(4990 <= client.ttl(name) <= 5000 for name in client.keys("*"))


def test_renewing_tells_which_are_gone(store: blobs.SyncBlobs) -> None:
    refs = [store.put(keys.blob("job", index), bytes(index * 900)) for index in range(4)]
    store.delete([refs[0], refs[2]])
    assert store.renew(iter(refs), 60) == [refs[0], refs[2]]
    assert store.renew([], 60) == []


@pytest.mark.parametrize("store", ["redis-sync", "file-sync", "memory-sync"], indirect=True)
def test_readers_never_see_half_a_blob(store: blobs.SyncBlobs) -> None:
    """A writer rewrites the same blob; readers get all of it, every time."""
    data = os.urandom(4 * CHUNK)
    ref = store.put(KEY, data)
    stop = threading.Event()

    def rewrite() -> None:
        while not stop.is_set():
            store.put(KEY, data)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(100):
            assert store.get(ref) == data
    finally:
        stop.set()
        writer.join()


def test_a_put_that_fails_leaves_no_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = blobs.FsspecBlobs(f"file://{tmp_path}", CHUNK)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        store.put(KEY, b"data")
    assert not (tmp_path / KEY.replace(":", "/")).exists()


@pytest.mark.parametrize("uri", ["file:///etc/passwd", "redis:ff:job:x", "file://{}/../secret", "file://{}", ""])
def test_a_reference_cannot_name_another_store_or_leave_this_one(tmp_path: Path, uri: str) -> None:
    (tmp_path / "secret").write_text("secret")
    store = blobs.FsspecBlobs(f"file://{tmp_path}/blobs")
    with pytest.raises(ValueError, match=r"not below|not the name"):
        store.get(BlobRef(uri=uri.format(f"{tmp_path}/blobs"), size_bytes=6))


def test_redis_refuses_references_of_other_stores(redis_store: blobs.SyncBlobs) -> None:
    with pytest.raises(ValueError, match="FLOWFLEET_BLOBS"):
        redis_store.get(BlobRef(uri="file:///etc/passwd"))


def test_the_setting_chooses_the_store(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async_client = connect(redis_url)
    with connect_sync(redis_url) as client:
        monkeypatch.delenv("FLOWFLEET_BLOBS", raising=False)
        assert isinstance(blobs.open_blobs(async_client).store, blobs.RedisBlobs)
        assert isinstance(blobs.open_blobs_sync(client).store, blobs.SyncRedisBlobs)
        monkeypatch.setenv("FLOWFLEET_BLOBS", f"file://{tmp_path}")
        assert isinstance(blobs.open_blobs(async_client).store, blobs.ThreadedBlobs)
        ref = blobs.open_blobs_sync(client).put(KEY, b"1")
        assert ref.uri == f"file://{tmp_path}/ff/job/blob/trajectory/0/1/2"
        assert isinstance(blobs.open_blobs_sync(client, "redis").store, blobs.SyncRedisBlobs)


def test_large_blobs_are_hashed_in_parallel_by_the_same_rule() -> None:
    data: Iterable[int] = os.urandom(64 * CHUNK + 3)
    assert blobs.digest(bytes(data), CHUNK) == expected_hash(bytes(data))
    assert blobs.digest(bytes(data)) == hashlib.sha256(bytes(data)).hexdigest()


async def test_what_is_read_and_written_is_counted(redis_url: str) -> None:
    registry = CollectorRegistry()
    client = connect(redis_url)
    store, again = (blobs.open_blobs(client, "redis", registry) for _ in range(2))
    ref = await store.put(KEY, b"12345")
    assert await again.get(ref) == await store.get(ref) == b"12345"
    await store.delete([ref])
    with pytest.raises(NotFound):
        await store.get(ref)
    await client.aclose()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"flowfleet_blob_{name}", labels)

    assert value("bytes_total", operation="put") == 5
    assert value("bytes_total", operation="get") == 2 * 5
    assert value("operations_total", operation="get", result="ok") == 2
    assert value("operations_total", operation="get", result="error") == 1
    assert value("operation_seconds_count", operation="get") == 2 + 1


@pytest.mark.parametrize("kind", ["file-sync", "file-async", "memory-sync"])
def test_old_blobs_of_the_named_kinds_are_swept(kind: str, redis_url: str, tmp_path: Path) -> None:
    (store,) = stores(kind, redis_url, tmp_path)
    refs = {name: store.put(keys.blob("job", name, 0), b"x", ttl_s=60) for name in ("media", "given", "trajectory")}
    now = time.time()
    assert store.sweep(("media", "given"), 60.0, now + 50.0) == 0
    assert store.sweep(("media", "given"), 60.0, now + 70.0) == 2
    assert store.get(refs["trajectory"]) == b"x"
    for name in ("media", "given"):
        with pytest.raises(NotFound):
            store.get(refs[name])


@pytest.mark.parametrize("kind", ["file-sync", "memory-sync"])
def test_what_another_deletes_meanwhile_is_gone_and_no_error(
    kind: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store still shows each blob when it is asked, as where the sweep removes it a moment later."""
    (store,) = stores(kind, redis_url, tmp_path)
    refs = [store.put(keys.blob("job", "media", number), b"x") for number in range(2)]
    store.delete(refs[:1])
    monkeypatch.setattr(store._fs, "exists", lambda path, **_: True)
    store.delete(refs)
    with pytest.raises(NotFound):
        store.get(refs[1])
    store.delete_prefix(keys.blob("none"))


@pytest.mark.parametrize("name", ["mtime", "LastModified", "last_modified"])
def test_the_sweep_goes_by_the_listing_in_few_calls_and_survives_other_sweeps(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Listed as stores do; one of the pictures is removed by another between listing and removal."""
    (store,) = stores("file-sync", redis_url, tmp_path)
    refs = [store.put(keys.blob("job", "media", number), b"x") for number in range(5)]
    now, find, asked, removed = time.time(), store._fs.find, Mock(), []
    when = now if name == "mtime" else datetime.fromtimestamp(now, UTC)
    rm = store._fs.rm

    def counted(paths: list[str]) -> None:
        removed.append(paths)
        rm(paths)

    def listed(root: str, **options: Any) -> dict[str, Any]:
        found = {path: {name: when} for path in find(root, **options)}
        store._fs.rm_file(next(iter(found)))
        return found

    monkeypatch.setattr(store._fs, "find", listed)
    monkeypatch.setattr(store._fs, "modified", asked)
    monkeypatch.setattr(store._fs, "rm", counted)
    assert store.sweep(("media",), 60.0, now + 50.0) == 0
    assert store.sweep(("media",), 60.0, now + 70.0) == 4
    assert (len(removed), asked.called) == (1, False)
    assert store.renew(refs, 60) == refs
