"""A scorer that asks a server, before a server that takes 200 ms for an answer: does the service keep it busy?

The server is a process of its own with no limit but the clock: with 64 requests under way it gives 64 / 0.2 s = 320
answers a second. `measure` asks it through the scorer itself, and through the service that runs the scorer, 64 samples
under way, each in a call of its own; the media are JPEGs of 512 × 512, passed on as they are.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from bench.reward_service import running
from flowfleet.proto.reward_pb2 import RewardSample, ScoreRequest
from flowfleet.proto.reward_pb2_grpc import RewardServiceStub
from flowfleet.rpc import open_channel
from services.reward.engines import encoded
from services.reward.scorers import make
from services.reward.scorers.base import AsyncScorer, Score

LATENCY_S, IN_FLIGHT = 0.2, 64
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Asking:
    """Medians over rounds of samples a second, and seconds of a sample."""

    scorer: str
    server_rate: float
    """What the server gives at most: requests under way over its latency."""
    direct_rate: float
    service_rate: float
    share: float
    """Median over rounds of the service's rate to that of the scorer itself."""
    share_of_server: float
    added_ms: float
    """Median latency of a call through the service, less that of the scorer itself."""


def measure(
    scorer: str, settings: Mapping[str, Any], samples: Sequence[RewardSample], seconds: float = 4.0, rounds: int = 3
) -> Asking:
    """Both ways in turn, `rounds` times, for so many seconds each. For any scorer that is an `AsyncScorer`."""
    flags = ["--scorer", scorer, *(part for key, value in settings.items() for part in ("--set", _setting(key, value)))]
    with TemporaryDirectory() as folder, running(Path(folder), *flags) as (_, address):
        return asyncio.run(_measure(scorer, settings, samples, address, seconds, rounds))


@contextmanager
def slow_server(latency_s: float = LATENCY_S, answer: Mapping[str, Any] | None = None) -> Iterator[str]:
    """The address of a server that answers each POST after so long, by default with one score in the shape "lists"."""
    argv = [sys.executable, "-m", "bench.reward_asking", str(latency_s), json.dumps(answer or {"scores": [0.5]})]
    process = psutil.Popen(argv, stdout=-1)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/"
    finally:
        process.terminate()
        process.wait()


async def _measure(
    name: str, settings: Mapping[str, Any], samples: Sequence[RewardSample], address: str, seconds: float, rounds: int
) -> Asking:
    scorer = make(name, settings, 1)
    assert isinstance(scorer, AsyncScorer)
    await scorer.start()
    params = scorer.parse({})
    async with open_channel(address) as channel:
        stub = RewardServiceStub(channel)

        async def direct(sample: RewardSample) -> None:
            (outcome,) = await scorer.score([encoded(sample)], params)
            assert isinstance(outcome, Score), outcome

        async def service(sample: RewardSample) -> None:
            response = await stub.Score(ScoreRequest(samples=[sample]), timeout=DEADLINE_S)
            assert response.scores[0].WhichOneof("outcome") == "score", response.scores[0].error

        for way in (direct, service):
            await _pressed(way, samples, 0.5)
        figures = [
            (await _pressed(direct, samples, seconds), await _pressed(service, samples, seconds)) for _ in range(rounds)
        ]
    await scorer.close()
    rates = [statistics.median(pair[way][0] for pair in figures) for way in (0, 1)]
    latencies = [statistics.median(pair[way][1] for pair in figures) for way in (0, 1)]
    share = statistics.median(served[0] / alone[0] for alone, served in figures)
    limit = IN_FLIGHT / LATENCY_S
    return Asking(name, limit, *rates, share, rates[1] / limit, 1000 * (latencies[1] - latencies[0]))


async def _pressed(
    way: Callable[[RewardSample], Awaitable[None]], samples: Sequence[RewardSample], seconds: float
) -> tuple[float, float]:
    """Samples a second and the median latency, with IN_FLIGHT under way for so long."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def keep_asking(place: int) -> None:
        while time.perf_counter() < end:
            start = time.perf_counter()
            await way(samples[place % len(samples)])
            latencies.append(time.perf_counter() - start)
            place += IN_FLIGHT

    start = time.perf_counter()
    await asyncio.gather(*(keep_asking(place) for place in range(IN_FLIGHT)))
    return len(latencies) / (time.perf_counter() - start), statistics.median(latencies)


def _setting(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"


async def _serve(latency_s: float, answer: bytes) -> None:
    response = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        len(answer),
        answer,
    )

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
                await asyncio.sleep(latency_s)
                writer.write(response)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0, limit=2**20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1]), sys.argv[2].encode()))
