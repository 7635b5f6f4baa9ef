"""Eight real replicas that start at once read one disk once.

Each has a disk of its own, with other weights on it: `/proc/self/cwd/model` is another folder in each process. So equal
samples show that all took the model of one, and inotify tells which disks were read.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfleet.proto.rollout_pb2 import ModelSpec
from flowfleet.weights import weights
from services.rollout.__main__ import parser
from tests import forks
from tests.services.rollout.conftest import LORA
from tests.services.rollout.replica import Client, ReplicaProcess, make_adapter, make_generate
from tests.tiny_models.qwen_image import make_tiny_qwen_image

NODES = 8
MODEL = ModelSpec(path="/proc/self/cwd/model", dtype="float32")
PARTS = ("transformer", "text_encoder", "vae")
IN_OPEN, IN_NONBLOCK = 0x20, 0o4000


class Disks:
    """Disks of nodes, and the files of weights that were opened on each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._queue = self._libc.inotify_init1(IN_NONBLOCK)
        self._watched: dict[int, tuple[int, str]] = {}

    def make(self, node: int) -> None:
        model = make_tiny_qwen_image(self.root / str(node) / "model", seed=node)
        for part in PARTS:
            watch = self._libc.inotify_add_watch(self._queue, os.fsencode(model / part), IN_OPEN)
            assert watch >= 0, os.strerror(ctypes.get_errno())
            self._watched[watch] = node, part

    def opened(self) -> set[tuple[int, str]]:
        """Node and file of each that was opened since the last call."""
        found = set()
        for watch, name in self._events():
            node, part = self._watched.get(watch, (-1, ""))
            if name.endswith(".safetensors"):
                found.add((node, f"{part}/{name}"))
        return found

    def _events(self) -> Iterator[tuple[int, str]]:
        while True:
            try:
                data = os.read(self._queue, 2**20)
            except BlockingIOError:
                return
            while data:
                watch, _, _, length = struct.unpack_from("iIII", data)
                yield watch, data[16 : 16 + length].rstrip(b"\0").decode()
                data = data[16 + length :]


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    disks = Disks(tmp_path)
    for node in range(NODES):
        disks.make(node)
    disks.opened()
    return disks


def start(root: Path, redis_url: str, node: int, *flags: str) -> ReplicaProcess:
    place = root / str(node)
    place.mkdir(exist_ok=True)
    flags = ("--replica-id", f"r{node}", "--device", "cpu", "--model-copies", str(place / "copies"), *flags)
    return ReplicaProcess(place / "replica", redis_url, *flags, cwd=place)


async def sampled(replica: ReplicaProcess, redis_url: str, state: dict) -> list[str]:  # type: ignore[type-arg]
    """Publishes to a replica as a trainer does; digests of what it samples then."""
    async with Client(replica.address, redis_url) as c:
        await c.init("job", MODEL, lora=LORA)
        await c.start("job", 0)
        await c.update_adapter("job", 0, await c.put_adapter("job", state))
        await c.finish("job", 0, weights.tensor_hashes(state.items()))
        return [sample.media.sha256 for sample in await c.generate(make_generate("job", 0))]


async def test_eight_replicas_read_one_copy_from_disk(disks: Disks, redis_url: str, tmp_path: Path) -> None:
    nodes = range(NODES)
    forks.address()  # one server for all threads
    starts = (asyncio.to_thread(start, tmp_path, redis_url, node) for node in nodes)
    outcomes = await asyncio.gather(*starts, return_exceptions=True)
    replicas = [outcome for outcome in outcomes if isinstance(outcome, ReplicaProcess)]
    try:
        assert len(replicas) == NODES, outcomes
        state = make_adapter(ModelSpec(path=str(tmp_path / "0/model"), dtype="float32"), LORA, seed=1)
        disks.opened()
        samples = await asyncio.gather(*(sampled(replica, redis_url, state) for replica in replicas))
        assert all(found == samples[0] for found in samples)
        opened = disks.opened()
        (reader,) = {node for node, _ in opened}
        whole = {str(file.relative_to(tmp_path / "0/model")) for file in (tmp_path / "0/model").rglob("*.safetensors")}
        assert {file for _, file in opened} == whole
        assert {file.partition("/")[0] for file in whole} == {*PARTS}

        # A later one, whose node has no model at all, takes it from the nearest, whose disk is gone as well.
        for node in nodes:
            if node != reader:
                shutil.rmtree(tmp_path / str(node) / "model")
        replicas.append(await asyncio.to_thread(start, tmp_path, redis_url, NODES, "--model", MODEL.path))
        assert await sampled(replicas[-1], redis_url, state) == samples[0]
        assert "took its files from" in replicas[-1].log.read_text()
    finally:
        for replica in replicas:
            replica.terminate()
    assert [replica.wait() for replica in replicas] == [0] * (NODES + 1)


def test_an_empty_folder_of_copies_turns_them_off() -> None:
    assert not parser().parse_args(["--model-copies=/a", "--model-copies="]).model_copies
