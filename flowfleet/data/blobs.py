"""Blobs: bytes too large for a stream entry, kept until a checkpoint covers the step that used them.

Two stores. `redis:<key>` lives in Redis with a TTL that guards against leaks; any fsspec URL (shared volume, object
store) is the other, which the leading controller sweeps. A reader gets exactly what was
written, checked by size and SHA-256, or an error: NotFound when it is gone, DataLoss when it is not the same.

Blobs over 256 MiB are cut into chunks (Redis refuses values over 512 MiB). Chunks are hashed in parallel, as hashlib
releases the GIL, so the `sha256` of such a blob is the SHA-256 over its chunks' hex digests one behind the other;
a smaller blob's is the plain SHA-256. The chunk size is part of the format: writer and reader must agree.

A blob in one chunk is one key, replaced at once. Several chunks are named by the blob's own hash, and the reference is
handed out after the last is written; so no reader ever meets half a blob.

Trainers are synchronous, the other services are not: `SyncBlobs` and `BlobStore` are the same in both worlds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import math
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import redis
import redis.asyncio
from prometheus_client import REGISTRY, CollectorRegistry

from flowfleet.data.blob_metrics import BlobMetrics
from flowfleet.errors import DataLoss, NotFound
from flowfleet.limits import MAX_BLOB_BYTES, check_bytes
from flowfleet.proto.common_pb2 import BlobRef

CHUNK_BYTES: Final = 256 * 2**20
WORKING_TTL_S: Final = 3 * 24 * 3600
"""Lifetime of blobs that may still be trained on, renewed every hour. It limits leaks and outlasts jumps of Redis's
clock of up to a day."""
PICTURE_TTL_S: Final = 24 * 3600
"""Lifetime of samples' pictures and videos."""
_INLINE_HASH_BYTES: Final = 4 * 2**20  # a few ms: not worth a thread
_SCAN_COUNT: Final = 1000
_NAME_DIGITS: Final = 16
_MODIFIED: Final = ("mtime", "LastModified", "last_modified")  # in listings of files and GCS, S3, and Azure

_READS_AT_ONCE: Final = 32  # of a client: each takes a connection, and to make one costs more than to wait

log = logging.getLogger(__name__)

T = TypeVar("T")

_turns: WeakKeyDictionary[redis.asyncio.Redis, asyncio.Semaphore] = WeakKeyDictionary()


class BlobStore(Protocol):
    """Blob store for asyncio. `key` comes from `flowfleet.redis.keys.blob`."""

    def uri(self, key: str) -> str:
        """How references name this key, and how those of keys below it begin."""

    async def put(self, key: str, data: bytes, *, ttl_s: int | None = None, by_content: bool = False) -> BlobRef:
        """Stores `data`; without a TTL until deleted. `by_content`: under the key and the start of the digest, so that
        other bytes never replace these."""

    async def get(self, ref: BlobRef) -> bytes:
        """NotFound when it is gone, DataLoss when size or hash differ."""

    async def delete(self, refs: Iterable[BlobRef]) -> None:
        """Missing ones are fine."""

    async def renew(self, refs: Iterable[BlobRef], ttl_s: int) -> list[BlobRef]:
        """Sets the time left to live, seconds, from now. Returns those that are gone."""

    async def delete_prefix(self, prefix: str) -> None:
        """Deletes every blob whose key starts so, e.g. `keys.blob(job)`."""

    async def sweep(self, kinds: Collection[str], ttl_s: float, now: float) -> int:
        """Deletes blobs of these kinds that are older, where the store does not end them itself; returns how many."""


class SyncBlobs(Protocol):
    """Blob store for threads; see `BlobStore`."""

    def uri(self, key: str) -> str: ...

    def put(self, key: str, data: bytes, *, ttl_s: int | None = None, by_content: bool = False) -> BlobRef: ...

    def get(self, ref: BlobRef) -> bytes: ...

    def delete(self, refs: Iterable[BlobRef]) -> None: ...

    def renew(self, refs: Iterable[BlobRef], ttl_s: int) -> list[BlobRef]: ...


def blobs_setting() -> str:
    """`FLOWFLEET_BLOBS`: "redis" (default) or an fsspec URL."""
    return os.environ.get("FLOWFLEET_BLOBS") or "redis"


def open_blobs(
    client: redis.asyncio.Redis, url: str | None = None, registry: CollectorRegistry = REGISTRY
) -> CountedBlobs:
    """The store of the setting, or of `url` ("redis" or an fsspec URL), counted in `registry`."""
    url = url or blobs_setting()
    return CountedBlobs(RedisBlobs(client) if url == "redis" else ThreadedBlobs(FsspecBlobs(url)), registry)


def open_blobs_sync(client: redis.Redis, url: str | None = None) -> SyncCountedBlobs:
    """Opens blobs for threads; see `open_blobs`."""
    url = url or blobs_setting()
    return SyncCountedBlobs(SyncRedisBlobs(client) if url == "redis" else FsspecBlobs(url), REGISTRY)


def digest(data: bytes, chunk_bytes: int = CHUNK_BYTES) -> str:
    """SHA-256 in lower-case hex; over the chunks' hex digests when there are several."""
    if len(data) <= chunk_bytes:
        return hashlib.sha256(data).hexdigest()
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        hashes = pool.map(lambda chunk: hashlib.sha256(chunk).hexdigest(), _cut(data, chunk_bytes))
        return hashlib.sha256("".join(hashes).encode()).hexdigest()


def verify(ref: BlobRef, data: bytes, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """Returns `data` if it is what the reference says; raises DataLoss otherwise."""
    if len(data) != ref.size_bytes:
        raise DataLoss(f"blob {ref.uri} has {len(data)} bytes, its reference says {ref.size_bytes}")
    actual = digest(data, chunk_bytes)
    if actual != ref.sha256:
        raise DataLoss(f"blob {ref.uri} has SHA-256 {actual}, its reference says {ref.sha256}")
    return data


def _named(key: str, sha256: str, by_content: bool) -> str:
    return f"{key}:{sha256[:_NAME_DIGITS]}" if by_content else key


class _RedisLayout:
    """Which Redis keys hold a blob."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes

    def uri(self, key: str) -> str:
        return f"redis:{key}"

    def _ref(self, key: str, data: bytes, by_content: bool) -> BlobRef:
        sha256 = digest(data, self._chunk_bytes)
        return BlobRef(uri=self.uri(_named(key, sha256, by_content)), size_bytes=len(data), sha256=sha256)

    def _keys(self, ref: BlobRef) -> list[str]:
        if not ref.uri.startswith("redis:"):
            raise ValueError(f"blob {ref.uri!r} is not in Redis: set FLOWFLEET_BLOBS alike on every service")
        key = ref.uri.removeprefix("redis:")
        check_bytes(f"blob {ref.uri[:200]}", ref.size_bytes, MAX_BLOB_BYTES)
        num_chunks = math.ceil(ref.size_bytes / self._chunk_bytes)
        return [key] if num_chunks <= 1 else [f"{key}:{ref.sha256}:{chunk}" for chunk in range(num_chunks)]

    def _chunks(self, ref: BlobRef, data: bytes) -> Iterator[tuple[str, memoryview]]:
        return zip(self._keys(ref), _cut(data, self._chunk_bytes), strict=True)

    def _join(self, ref: BlobRef, chunks: list[bytes | None]) -> bytes:
        if any(chunk is None for chunk in chunks):
            raise NotFound(f"blob {ref.uri} is gone: it expired or was deleted")
        present = [chunk for chunk in chunks if chunk is not None]
        return verify(ref, present[0] if len(present) == 1 else b"".join(present), self._chunk_bytes)


class RedisBlobs(_RedisLayout):
    """`BlobStore` in Redis."""

    def __init__(self, client: redis.asyncio.Redis, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__(chunk_bytes)
        self._redis = client
        self._turn = _turns.setdefault(client, asyncio.Semaphore(_READS_AT_ONCE))

    async def put(self, key: str, data: bytes, *, ttl_s: int | None = None, by_content: bool = False) -> BlobRef:
        ref = await _offload(len(data), self._ref, key, data, by_content)
        for name, chunk in self._chunks(ref, data):
            await self._redis.set(name, chunk, ex=ttl_s)
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        async with self._turn:
            chunks = [cast(bytes | None, await self._redis.get(name)) for name in self._keys(ref)]
        return await _offload(ref.size_bytes, self._join, ref, chunks)

    async def delete(self, refs: Iterable[BlobRef]) -> None:
        names = [name for ref in refs for name in self._keys(ref)]
        if names:
            await self._redis.unlink(*names)

    async def renew(self, refs: Iterable[BlobRef], ttl_s: int) -> list[BlobRef]:
        refs = list(refs)
        pipe = self._redis.pipeline(transaction=False)
        for name in (name for ref in refs for name in self._keys(ref)):
            pipe.expire(name, ttl_s)
        return _gone(refs, [len(self._keys(ref)) for ref in refs], await pipe.execute())

    async def delete_prefix(self, prefix: str) -> None:
        async for name in self._redis.scan_iter(match=_escaped(prefix) + "*", count=_SCAN_COUNT):
            await self._redis.unlink(name)

    async def sweep(self, kinds: Collection[str], ttl_s: float, now: float) -> int:
        return 0


class SyncRedisBlobs(_RedisLayout):
    """`SyncBlobs` in Redis."""

    def __init__(self, client: redis.Redis, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__(chunk_bytes)
        self._redis = client

    def put(self, key: str, data: bytes, *, ttl_s: int | None = None, by_content: bool = False) -> BlobRef:
        ref = self._ref(key, data, by_content)
        for name, chunk in self._chunks(ref, data):
            self._redis.set(name, chunk, ex=ttl_s)
        return ref

    def get(self, ref: BlobRef) -> bytes:
        return self._join(ref, [cast(bytes | None, self._redis.get(name)) for name in self._keys(ref)])

    def delete(self, refs: Iterable[BlobRef]) -> None:
        names = [name for ref in refs for name in self._keys(ref)]
        if names:
            self._redis.unlink(*names)

    def renew(self, refs: Iterable[BlobRef], ttl_s: int) -> list[BlobRef]:
        refs = list(refs)
        pipe = self._redis.pipeline(transaction=False)
        for name in (name for ref in refs for name in self._keys(ref)):
            pipe.expire(name, ttl_s)
        return _gone(refs, [len(self._keys(ref)) for ref in refs], pipe.execute())


class FsspecBlobs:
    """`SyncBlobs` under any fsspec URL. TTLs are ignored: pictures are swept, and all else goes with what it is of."""

    def __init__(self, url: str, chunk_bytes: int = CHUNK_BYTES) -> None:
        import fsspec

        self._url = url.rstrip("/")
        self._fs, self._root = fsspec.core.url_to_fs(self._url)
        self._chunk_bytes = chunk_bytes

    def uri(self, key: str) -> str:
        return f"{self._url}/{key.replace(':', '/')}"

    def put(self, key: str, data: bytes, *, ttl_s: int | None = None, by_content: bool = False) -> BlobRef:
        sha256 = digest(data, self._chunk_bytes)
        key = _named(key, sha256, by_content)
        self._write(self._path(key.replace(":", "/")), data)
        return BlobRef(uri=self.uri(key), size_bytes=len(data), sha256=sha256)

    def get(self, ref: BlobRef) -> bytes:
        try:
            data: bytes = self._fs.cat_file(self._of(ref))
        except FileNotFoundError:
            raise NotFound(f"blob {ref.uri} is gone: it was deleted") from None
        return verify(ref, data, self._chunk_bytes)

    def delete(self, refs: Iterable[BlobRef]) -> None:
        for path in map(self._of, refs):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)

    def renew(self, refs: Iterable[BlobRef], ttl_s: int) -> list[BlobRef]:
        return [ref for ref in refs if not self._fs.exists(self._of(ref))]

    def delete_prefix(self, prefix: str) -> None:
        path = self._path(prefix.rstrip(":").replace(":", "/"))
        with contextlib.suppress(FileNotFoundError):  # others delete below it
            if self._fs.exists(path):
                self._fs.rm(path, recursive=True)

    def sweep(self, kinds: Collection[str], ttl_s: float, now: float) -> int:
        root = f"{self._root.rstrip('/')}/"
        old: list[str] = []
        for path, listed in self._fs.find(root, detail=True).items():
            kind = (str(path).removeprefix(root).split("/") + [""] * 4)[3]  # as keys.blob names them
            with contextlib.suppress(FileNotFoundError):  # it has just been deleted
                if kind in kinds and now - self._modified(path, listed) > ttl_s:
                    old.append(path)
        for start in range(0, len(old), _SCAN_COUNT):
            self._remove(old[start : start + _SCAN_COUNT])
        return len(old)

    def _modified(self, path: str, listed: Mapping[str, Any]) -> float:
        """Unix seconds; asks the store where its listing does not tell, which is a call a file."""
        found = (listed.get(name) for name in _MODIFIED)
        when = next((one for one in found if isinstance(one, float | datetime)), None) or self._fs.modified(path)
        return float(when.timestamp() if isinstance(when, datetime) else when)

    def _remove(self, paths: list[str]) -> None:
        """Removes many, of which others may have removed some: in few calls where the store can."""
        try:
            self._fs.rm(paths)
        except FileNotFoundError:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(path)

    def _write(self, path: str, data: bytes) -> None:
        """Object stores show an object when it is complete; a file is written aside and renamed."""
        if "file" not in _protocols(self._fs):
            self._fs.pipe_file(path, data)
            return
        self._fs.makedirs(os.path.dirname(path), exist_ok=True)
        aside = f"{path}.{uuid.uuid4().hex}.part"
        self._fs.pipe_file(aside, data)
        os.replace(aside, path)

    def _of(self, ref: BlobRef) -> str:
        if not ref.uri.startswith(f"{self._url}/"):
            raise ValueError(f"blob {ref.uri!r} is not below {self._url}: set FLOWFLEET_BLOBS alike on every service")
        return self._path(ref.uri.removeprefix(f"{self._url}/"))

    def _path(self, relative: str) -> str:
        if any(part in ("", ".", "..") for part in relative.split("/")):
            raise ValueError(f"{relative!r} is not the name of a blob")
        return f"{self._root.rstrip('/')}/{relative}"


class ThreadedBlobs:
    """`BlobStore` over files, each call in a worker thread."""

    def __init__(self, store: FsspecBlobs) -> None:
        self._store = store
        self.uri = store.uri

    async def put(self, key: str, data: bytes, *, ttl_s: int | None = None, by_content: bool = False) -> BlobRef:
        return await asyncio.to_thread(self._store.put, key, data, ttl_s=ttl_s, by_content=by_content)

    async def get(self, ref: BlobRef) -> bytes:
        return await asyncio.to_thread(self._store.get, ref)

    async def delete(self, refs: Iterable[BlobRef]) -> None:
        await asyncio.to_thread(self._store.delete, refs)

    async def renew(self, refs: Iterable[BlobRef], ttl_s: int) -> list[BlobRef]:
        return await asyncio.to_thread(self._store.renew, refs, ttl_s)

    async def delete_prefix(self, prefix: str) -> None:
        await asyncio.to_thread(self._store.delete_prefix, prefix)

    async def sweep(self, kinds: Collection[str], ttl_s: float, now: float) -> int:
        return await asyncio.to_thread(self._store.sweep, kinds, ttl_s, now)


class CountedBlobs:
    """`BlobStore` over another, whose reads and writes are counted."""

    def __init__(self, store: BlobStore, registry: CollectorRegistry) -> None:
        self._metrics = BlobMetrics.of(registry)
        self.store, self.uri = store, store.uri
        self.delete, self.renew, self.delete_prefix = store.delete, store.renew, store.delete_prefix
        self.sweep = store.sweep

    async def put(self, key: str, data: bytes, *, ttl_s: int | None = None, by_content: bool = False) -> BlobRef:
        with self._metrics.time("put", len(data)):
            return await self.store.put(key, data, ttl_s=ttl_s, by_content=by_content)

    async def get(self, ref: BlobRef) -> bytes:
        with self._metrics.time("get", ref.size_bytes):
            return await self.store.get(ref)


class SyncCountedBlobs:
    """`SyncBlobs` over another, as `CountedBlobs`."""

    def __init__(self, store: SyncBlobs, registry: CollectorRegistry) -> None:
        self._metrics = BlobMetrics.of(registry)
        self.store, self.uri = store, store.uri
        self.delete, self.renew = store.delete, store.renew

    def put(self, key: str, data: bytes, *, ttl_s: int | None = None, by_content: bool = False) -> BlobRef:
        with self._metrics.time("put", len(data)):
            return self.store.put(key, data, ttl_s=ttl_s, by_content=by_content)

    def get(self, ref: BlobRef) -> bytes:
        with self._metrics.time("get", ref.size_bytes):
            return self.store.get(ref)


async def discard(store: BlobStore, refs: Iterable[BlobRef]) -> bool:
    """Deletes what is no longer needed. False, and a line in the log, where the store of files fails."""
    try:
        await store.delete(refs)
    except redis.RedisError:
        raise
    except Exception as error:  # of whatever a store's client raises
        log.warning("blobs that are no longer needed stay, as their store failed: %s: %s", type(error).__name__, error)
        return False
    return True


def _cut(data: bytes, chunk_bytes: int) -> list[memoryview]:
    view = memoryview(data)
    return [view[start : start + chunk_bytes] for start in range(0, max(len(data), 1), chunk_bytes)]


def _gone(refs: list[BlobRef], num_keys: list[int], renewed: list[Any]) -> list[BlobRef]:
    flags = iter(renewed)
    alive = [all(list(itertools.islice(flags, count))) for count in num_keys]
    return [ref for ref, is_alive in zip(refs, alive, strict=True) if not is_alive]


async def _offload(size_bytes: int, function: Callable[..., T], *args: Any) -> T:
    """Hashing much would stop the event loop."""
    return function(*args) if size_bytes <= _INLINE_HASH_BYTES else await asyncio.to_thread(function, *args)


def _escaped(prefix: str) -> str:
    return "".join(f"\\{letter}" if letter in "*?[]\\^-" else letter for letter in prefix)


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
