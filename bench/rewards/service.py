"""A reward service as a process, for benchmarks."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import psutil

from flowfleet.proto.reward_pb2 import DescribeRequest
from flowfleet.proto.reward_pb2_grpc import RewardServiceStub
from flowfleet.rewards.requests import ScoreCall, score_method
from flowfleet.rpc.endpoint import open_channel

DEADLINE_S = 300.0
END_S = 10.0


@contextmanager
def running(folder: Path, *flags: str, module: str = "services.reward") -> Iterator[tuple[psutil.Process, str]]:
    """A reward service that is up, and its address."""
    port_file = folder / "port"
    argv = [sys.executable, "-m", module, "--port-file", str(port_file), "--log-level", "warning", *flags]
    process = psutil.Popen(argv)
    try:
        while not port_file.exists():
            assert process.poll() is None, "the service did not start"
            time.sleep(0.05)
        yield process, port_file.read_text()
    finally:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
        process.wait()


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time so far of a process and its descendants."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


class RestartedService:
    """One service process, which is started again when it ends."""

    def __init__(self, folder: Path, module: str, flags: Sequence[str]) -> None:
        self._folder, self._module, self._flags = folder, module, flags
        self._stack = ExitStack()
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        service = running(folder, *self._flags, module=self._module)
        self.process, address = await asyncio.to_thread(self._stack.enter_context, service)
        self._channel = open_channel(address)

    async def stop(self) -> None:
        await self._channel.close(grace=END_S)
        await asyncio.to_thread(self._stack.close)

    async def call_bytes(self) -> int:
        return (await RewardServiceStub(self._channel).Describe(DescribeRequest(), timeout=DEADLINE_S)).call_bytes

    async def score(self, call: ScoreCall) -> list[bool] | None:
        """Whether each sample has a score; None if the service ended, once it is up again."""
        process = self.process
        try:
            response = await score_method(self._channel)(call.write(), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            async with self._starting:
                if process is self.process:
                    await asyncio.to_thread(process.wait, DEADLINE_S)
                    await self.stop()
                    await self.start()
            return None
        return [given.WhichOneof("outcome") == "score" for given in response.scores]

    def pss(self) -> int:
        processes = (self.process, *self.process.children(recursive=True))
        return sum(one.memory_full_info().pss for one in processes)
