"""A model's files from live replicas and trainers, so that many new replicas read its disk once.

Redis has a list for each model: the processes that have its files or take them, oldest first. The first reads them
where they are. Each later one takes them from the nearest before it, which passes on what has arrived: a chain. A peer
that fails leads to the next one, and the last one's failure, as Redis's absence, to the model's own place.

Files that arrived are used only if their fingerprint is the one that was announced, and the job's if it names one.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc.aio
from redis.exceptions import RedisError

from flowfleet import hub
from flowfleet.errors import DataLoss, FlowfleetError, Full, NotFound
from flowfleet.job.fingerprints import differ, files_of, fingerprint
from flowfleet.proto.models_pb2 import ModelFile, ModelFiles, ModelPiece, ReadModelRequest
from flowfleet.proto.models_pb2_grpc import ModelServiceServicer, ModelServiceStub
from flowfleet.redis import keys
from flowfleet.rpc import endpoint as rpc

FIRST_S: Final = 300.0
STALL_S: Final = 30.0
"""Longest waits for a peer's first piece, since the first of a chain may download the model, and for the next ones."""
_PIECE_BYTES: Final = 2**22
_POLL_S: Final = 0.02
_FREE_SHARE: Final = 0.2
"""Part of the disk that stays free: below 15 % Kubernetes evicts pods."""

log = logging.getLogger(__name__)


class _Held:
    """A model that this process has, or takes."""

    folder = Path()
    files = ModelFiles()
    arrives = True


class Peers(ModelServiceServicer):
    """The model of this process. `copies` is a folder of its own, emptied first, for what it takes; without one it
    takes none. `address` is where peers reach it, set once its server listens; while it is empty it gives none."""

    def __init__(self, client: Any, copies: Path | None = None) -> None:
        self.address = ""
        self._redis, self._copies = client, copies
        self._held: dict[str, _Held] = {}
        if copies is not None:
            shutil.rmtree(copies, ignore_errors=True)
            copies.mkdir(parents=True)

    async def model(self, path: str, wanted: str = "") -> Path:
        """The folder of a model, in place of the last one. `wanted`: fingerprint that peers must have. Raises
        ValueError as `hub.pipeline`."""
        if not self.address:
            return await asyncio.to_thread(hub.pipeline, path)
        held = self._held.get(path)
        if held is None or (wanted and differ(wanted, held.files.fingerprint)):
            await self.close()
            held = self._held[path] = _Held()
            try:
                await self._get(held, path, wanted)
            except BaseException:
                await self.close()
                raise
            held.arrives = False
        return held.folder

    async def close(self) -> None:
        """Leaves the list and removes the copy."""
        while self._held:
            path, held = self._held.popitem()
            held.arrives = False
            await self._unlist(path, self.address)
            await self._remove_copy(held)

    async def Read(self, request: ReadModelRequest, context: Any) -> AsyncIterator[ModelPiece]:
        held = self._held.get(request.path)
        while held and held.arrives and not held.files.fingerprint:
            await asyncio.sleep(_POLL_S)
        if held is None or not (files := held.files).fingerprint:
            raise NotFound(f"this process does not have the model {request.path}")
        yield ModelPiece(files=files)
        for file in files.files:
            offset = 0
            while offset < file.size:
                is_last = not held.arrives  # asked before the file: more may arrive in between
                if data := await asyncio.to_thread(_read, held.folder / file.name, offset):
                    offset += len(data)
                    yield ModelPiece(data=data)
                elif is_last or held.files != files:
                    raise DataLoss(f"{file.name} ended after {offset} bytes")
                else:
                    await asyncio.sleep(_POLL_S)

    async def _get(self, held: _Held, path: str, wanted: str) -> None:
        for address in await self._nearest_first(path):
            try:
                await self._take(held, path, address, wanted)
                return
            except (grpc.aio.AioRpcError, FlowfleetError, OSError, ValueError, StopAsyncIteration) as error:
                log.warning("model %s: %s gave no copy: %s", path, address, rpc.rpc_error_message(error))
                if isinstance(error, grpc.aio.AioRpcError):
                    await self._unlist(path, address)
        await self._remove_copy(held)
        held.folder = await asyncio.to_thread(hub.pipeline, path)
        held.files = await asyncio.to_thread(_described, held.folder)
        log.info("model %s: read from %s", path, held.folder)

    async def _take(self, held: _Held, path: str, address: str, wanted: str) -> None:
        async with rpc.open_channel(address) as channel:
            stub: Any = ModelServiceStub(channel)
            pieces = aiter(stub.Read(ReadModelRequest(path=path), timeout=24 * 3600.0))
            files = (await asyncio.wait_for(anext(pieces), FIRST_S)).files
            if wanted and differ(wanted, files.fingerprint):
                raise DataLoss("it has other files than the job began with")
            await self._remove_copy(held)
            held.folder, held.files = Path(tempfile.mkdtemp(dir=self._copies)), files
            needed, disk = sum(file.size for file in files.files), shutil.disk_usage(held.folder)
            if disk.free - needed < _FREE_SHARE * disk.total:
                raise Full(f"{self._copies} has {disk.free} bytes free, too few for a copy of {needed}")
            for file in files.files:
                if file.name.startswith("/") or ".." in file.name.split("/"):
                    raise DataLoss(f"{file.name!r} is not a name within a folder")
                size = await asyncio.to_thread(_append, held.folder / file.name, b"")
                while size < file.size:
                    piece = await asyncio.wait_for(anext(pieces), STALL_S)
                    size += await asyncio.to_thread(_append, held.folder / file.name, piece.data)
        if await asyncio.to_thread(fingerprint, held.folder) != files.fingerprint:
            raise DataLoss("the files that arrived have another fingerprint than it announced")
        log.info("model %s: took its files from %s", path, address)

    async def _remove_copy(self, held: _Held) -> None:
        if self._copies is not None and held.folder.is_relative_to(self._copies):
            await asyncio.to_thread(shutil.rmtree, held.folder, ignore_errors=True)

    async def _nearest_first(self, path: str) -> list[str]:
        """Joins the list. Returns the processes before this one; none if this one takes no copies."""
        key, mine = keys.model_holders(path), self.address.encode()
        try:
            await self._redis.lrem(key, 0, mine)
            await self._redis.rpush(key, mine)
            await self._redis.ltrim(key, -256, -1)
            listed: list[bytes] = await self._redis.lrange(key, 0, -1)
        except RedisError as error:
            log.warning("could not ask Redis who has the model %s: %s", path, error)
            return []
        before = listed[: listed.index(mine)] if mine in listed and self._copies is not None else []
        return [address.decode(errors="replace") for address in reversed(before)]

    async def _unlist(self, path: str, address: str) -> None:
        with suppress(RedisError):
            await self._redis.lrem(keys.model_holders(path), 0, address)


def _append(file: Path, data: bytes) -> int:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as out:
        return out.write(data)


def _read(file: Path, offset: int) -> bytes:
    """Up to a piece; nothing where the file has not come that far."""
    with suppress(FileNotFoundError), file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(_PIECE_BYTES)
    return b""


def _described(folder: Path) -> ModelFiles:
    found = [file for file in sorted(files_of(folder)) if file.is_file()]
    files = [ModelFile(name=str(file.relative_to(folder)), size=file.stat().st_size) for file in found]
    return ModelFiles(fingerprint=fingerprint(folder), files=files)
