"""Models from peers, in one process: each `Peers` has a server of its own, and one Redis lists them."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from flowfleet import peers as peers_module
from flowfleet.job.fingerprints import fingerprint
from flowfleet.peers import Peers
from flowfleet.proto import models_pb2, models_pb2_grpc
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from flowfleet.rpc import endpoint as rpc
from tests import serving

SIZES = {"model_index.json": 40, "transformer/a.safetensors": 3_000_000, "vae/b.safetensors": 700_001, "empty.txt": 0}
Make = Callable[..., Awaitable[Peers]]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_PIECE_BYTES", 2**16)
    monkeypatch.setattr(peers_module, "_FREE_SHARE", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in SIZES.items():
        file = tmp_path / "model" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(size))
    return tmp_path / "model"


@pytest.fixture
async def make(tmp_path: Path, redis_url: str) -> AsyncIterator[Make]:
    """Makes a process of the fleet; one without `copies` takes none."""
    made: list[tuple[Peers, Any, Any]] = []

    async def one(*, takes: bool = True) -> Peers:
        client, server = connect(redis_url), rpc.make_server()
        peers = Peers(client, tmp_path / "copies" / str(len(made)) if takes else None)
        serving.add(server, peers)
        peers.address = f"127.0.0.1:{rpc.listen(server, '127.0.0.1', 0)}"
        await server.start()
        made.append((peers, server, client))
        one.servers[peers.address] = server  # type: ignore[attr-defined]
        return peers

    one.servers = {}  # type: ignore[attr-defined]
    yield one
    for peers, server, client in made:
        await peers.close()
        await server.stop(None)
        await client.aclose()


def held(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


async def test_of_eight_that_begin_at_once_one_reads_the_disk(
    folder: Path, make: Make, tmp_path: Path, redis: Any
) -> None:
    fleet = [await make() for _ in range(8)]
    places = await asyncio.gather(*(peers.model(str(folder)) for peers in fleet))
    assert sorted(place == folder for place in places) == [False] * 7 + [True]
    assert all(held(place) == held(folder) for place in places)
    assert len({*places}) == 8
    again = await asyncio.gather(*(peers.model(str(folder), fingerprint(folder)) for peers in fleet))
    assert again == places
    for peers in fleet:
        await peers.close()
    assert not [file for file in (tmp_path / "copies").rglob("*") if file.is_file()]
    assert await redis.exists(keys.model_holders(str(folder))) == 0


async def test_a_copy_passes_on_while_it_arrives(folder: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for its last piece until the third has all others."""
    first, second, third = [await make() for _ in range(3)]
    await first.model(str(folder))
    gate, read = asyncio.Event(), peers_module._read
    loop = asyncio.get_running_loop()

    def slow(file: Path, offset: int) -> bytes:
        if file == folder / "transformer/a.safetensors" and offset >= 2_900_000:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return read(file, offset)

    monkeypatch.setattr(peers_module, "_read", slow)
    taking = asyncio.create_task(second.model(str(folder)))
    while str(folder) not in second._held or not second._held[str(folder)].files.fingerprint:
        await asyncio.sleep(0.01)
    passing = asyncio.create_task(third.model(str(folder)))
    passed = 0
    while passed < 2_900_000:
        files = third._held[str(folder)].folder if str(folder) in third._held else Path("/nowhere")
        part = files / "transformer/a.safetensors"
        passed = part.stat().st_size if part.exists() else 0
        await asyncio.sleep(0.01)
    assert not taking.done()
    gate.set()
    assert held(await taking) == held(await passing) == held(folder)


async def test_a_peer_that_dies_midway_is_followed_by_the_next(
    folder: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that takes from the one whose peer died gets all bytes as well."""
    first, second, third, fourth = [await make() for _ in range(4)]
    await first.model(str(folder))
    copy = await second.model(str(folder))
    read = peers_module._read
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def dying(file: Path, offset: int) -> bytes:
        if file.is_relative_to(copy) and offset >= 1_000_000:
            asyncio.run_coroutine_threadsafe(begun.wait(), loop).result()
            raise OSError("the disk is gone")
        return read(file, offset)

    monkeypatch.setattr(peers_module, "_read", dying)
    taking = asyncio.create_task(third.model(str(folder)))
    while str(folder) not in third._held or not third._held[str(folder)].files.fingerprint:
        await asyncio.sleep(0.01)
    last = asyncio.create_task(fourth.model(str(folder)))
    while str(folder) not in fourth._held or not fourth._held[str(folder)].files.fingerprint:
        await asyncio.sleep(0.01)
    begun.set()
    places = [await taking, await last]
    assert all(place != folder and held(place) == held(folder) for place in places)


async def test_after_wrong_bytes_the_next_peer_gives_all_files(
    folder: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = [await make() for _ in range(3)]
    await first.model(str(folder))
    copy = await second.model(str(folder))
    data = bytearray((copy / "vae/b.safetensors").read_bytes())
    data[0] ^= 1
    (copy / "vae/b.safetensors").write_bytes(data)
    place = await third.model(str(folder))
    assert place != folder
    assert held(place) == held(folder)
    assert [*third._copies.iterdir()] == [place]  # type: ignore[union-attr]


async def test_a_peer_that_is_gone_leaves_the_list(folder: Path, make: Make, redis: Any) -> None:
    first, second = [await make() for _ in range(2)]
    await redis.rpush(keys.model_holders(str(folder)), "127.0.0.1:1", "not an address")
    assert await first.model(str(folder)) == folder
    assert held(await second.model(str(folder))) == held(folder)
    await make.servers[first.address].stop(None)  # type: ignore[attr-defined]
    third = await make()
    assert held(await third.model(str(folder))) == held(folder)
    listed = await redis.lrange(keys.model_holders(str(folder)), 0, -1)
    assert listed == [b"not an address", *(peers.address.encode() for peers in (first, second, third))]


async def test_other_files_than_the_jobs_are_not_taken(folder: Path, make: Make, tmp_path: Path) -> None:
    first, second = [await make() for _ in range(2)]
    before = fingerprint(folder)
    await first.model(str(folder))
    taken = await second.model(str(folder), before)
    (folder / "vae/b.safetensors").write_bytes(os.urandom(700_001))
    now = fingerprint(folder)
    assert await second.model(str(folder), now) == folder
    assert not taken.exists()
    third = await make()
    assert await third.model(str(folder), now) != folder
    assert fingerprint(third._held[str(folder)].folder) == now


@pytest.mark.parametrize("what", ["wrong", "name", "short"])
async def test_files_that_do_not_arrive_whole_are_not_used(
    folder: Path, make: Make, monkeypatch: pytest.MonkeyPatch, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = [await make() for _ in range(2)]
    await first.model(str(folder))
    description, read = first._held[str(folder)].files, peers_module._read
    if what == "name":
        description.files[0].name = "../outside"
    elif what == "short":
        description.files[1].size += 1
    else:
        monkeypatch.setattr(peers_module, "_read", lambda *given: read(*given)[:-1] + b"x")
    assert await second.model(str(folder)) == folder
    assert not [*second._copies.iterdir()]  # type: ignore[union-attr]
    reason = {"wrong": "another fingerprint", "name": "is not a name within", "short": "ended after"}[what]
    assert reason in caplog.text


class Away:
    """A Redis that cannot be reached, once the client has given up."""

    def __getattr__(self, name: str) -> Any:
        async def call(*_: Any) -> None:
            raise RedisConnectionError(name)

        return call


async def test_without_room_or_redis_a_model_is_read_where_it_is(
    folder: Path, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, alone = await make(), await make(), await make()
    alone._redis = Away()
    assert await first.model(str(folder)) == await alone.model(str(folder)) == folder
    monkeypatch.setattr(peers_module, "_FREE_SHARE", 1.0)
    assert await second.model(str(folder)) == folder
    assert "too few for a copy" in caplog.text
    assert "could not ask Redis" in caplog.text
    with pytest.raises(ValueError, match="no folder some/name is here"):
        await second.model("some/name")
    assert "some/name" not in second._held


async def test_a_trainer_gives_and_takes_none(folder: Path, make: Make, tmp_path: Path) -> None:
    first, trainer, last = await make(), await make(takes=False), await make()
    await first.model(str(folder))
    assert await trainer.model(str(folder)) == folder
    await make.servers[first.address].stop(None)  # type: ignore[attr-defined]
    assert await last.model(str(folder)) != folder


async def test_unknown_models_are_not_found(folder: Path, make: Make, tmp_path: Path) -> None:
    first, empty = await make(), tmp_path / "empty"
    empty.mkdir()
    await first.model(str(empty))
    async with rpc.open_channel(first.address) as channel:
        stub: Any = models_pb2_grpc.ModelServiceStub(channel)
        for path in ("/etc", str(empty)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Read(models_pb2.ReadModelRequest(path=path), timeout=5).read()
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_restart_begins_with_an_empty_folder_of_copies(tmp_path: Path, make: Make, folder: Path) -> None:
    (tmp_path / "copies" / "0" / "left").mkdir(parents=True)
    peers = await make()
    assert not [*peers._copies.iterdir()]  # type: ignore[union-attr]
    another = tmp_path / "another"
    shutil.copytree(folder, another)
    first, second = await make(takes=False), await make(takes=False)
    await first.model(str(folder))
    await second.model(str(another))
    one = await peers.model(str(folder))
    two = await peers.model(str(another))
    assert held(two) == held(another)
    assert not one.exists()
