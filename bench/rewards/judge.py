"""Do `vlm` and `http` keep a slow server busy, and what do they pay for it?

    python -m bench.rewards.judge [--latency-ms 200] [--in-flight 64] [--seconds 5] [--rounds 5] [--json FILE]

A server in a process of its own answers every question after a fixed time, and so many at once: by Little's law it
gives at most in_flight / latency answers a second. Each round asks it in three ways, one after the other, with as many
questions under way: a bare client on raw sockets, whose requests were made beforehand (what this machine lets anybody
reach); the scorer itself; and its service over gRPC, a sample a call. The pictures are 512 × 512, as JPEG and as PNG,
and pass as they are. Answers are counted after a second of warming up. Medians over rounds, and the milliseconds of CPU
that a question costs each process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from prometheus_client import CollectorRegistry

from bench.rewards.judge_server import ANSWER, serve
from bench.rewards.reward import as_jpeg, pictures
from bench.rewards.service import cpu_seconds, running
from flowfleet.process.service import keep_freed_memory, usable_cpus
from flowfleet.rewards.requests import EncodedSample, ScoreCall, score_method
from flowfleet.rpc.endpoint import open_channel
from services.reward.judge.media import Picture
from services.reward.judge.messages import chat_request
from services.reward.judge.metrics import JudgeMetrics
from services.reward.judge.settings import VlmSettings
from services.reward.scorer import AsyncScorer, Score
from services.reward.scorers.http_scorer import HttpScorer, HttpSettings
from services.reward.scorers.vlm import VlmScorer

WARM_UP_S = 1.0
DEADLINE_S = 120.0
NUM_PICTURES = 16

Way = Callable[[EncodedSample], Awaitable[None]]


@dataclass(frozen=True)
class Figures:
    """Medians over rounds; rates are answers a second."""

    scorer: str
    media: str
    kilobytes: float
    """Mean size of a picture."""
    latency_ms: float
    in_flight: int
    limit: float
    """What the server gives at most."""
    bare_rate: float
    scorer_rate: float
    service_rate: float
    scorer_of_limit: float
    service_of_limit: float
    scorer_of_bare: float
    """Median of the rounds' ratios; so `service_of_bare`."""
    service_of_bare: float
    bare_cpu_ms: float
    """CPU time of this process per question."""
    scorer_cpu_ms: float
    service_cpu_ms: float
    """CPU time of the service's process; `caller_cpu_ms` is that of its caller."""
    caller_cpu_ms: float
    server_cpu_ms: float
    """CPU time of the server's process, where the scorer calls one."""


@dataclass(frozen=True)
class Press:
    """One way under pressure: answers a second, and the milliseconds of CPU of an answer, by process."""

    rate: float
    cpu_ms: Mapping[int, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["vlm", "http"], choices=["vlm", "http"], help="(both)")
    parser.add_argument("--latency-ms", type=float, default=200.0)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0, help="of one way in one round, after warming up (5)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    keep_freed_memory()  # as the controller does, which is the caller in a fleet
    before = os.getloadavg()
    png = pictures(NUM_PICTURES)
    rows: list[Figures] = []
    for scorer in options.only:
        for samples in (as_jpeg(png), png):
            rows.append(one(scorer, samples, options))
            print(_line(rows[-1]), flush=True)
            machine = {"cpus": usable_cpus(), "load_before": before, "load_after": os.getloadavg()}
            if options.json:
                figures = {"machine": machine, "rounds": options.rounds, "figures": [asdict(row) for row in rows]}
                options.json.write_text(json.dumps(figures, indent=2) + "\n")


def one(scorer: str, samples: Sequence[EncodedSample], options: argparse.Namespace) -> Figures:
    """A scorer with pictures of one kind."""
    with slow_server(options.latency_ms / 1000, options.in_flight) as (server, port), TemporaryDirectory() as folder:
        settings = settings_of(scorer, port, options.in_flight)
        flags = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        with running(Path(folder), "--scorer", scorer, *flags) as (service, address):
            ways = _Ways(scorer, settings, port, address, samples, [server, service], options)
            return _figures(scorer, samples, options, asyncio.run(ways.rounds()), server.pid, service.pid)


@contextmanager
def slow_server(latency_s: float, in_flight: int) -> Iterator[tuple[psutil.Process, int]]:
    """The server's process, and its port on loopback."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(latency_s, in_flight, there))
    process.start()
    try:
        yield psutil.Process(process.pid), here.recv()
    finally:
        process.terminate()
        process.join()


def settings_of(scorer: str, port: int, in_flight: int) -> dict[str, Any]:
    """Defaults but for the calls under way; every question is asked, none is known."""
    if scorer == "http":
        return {"url": f"http://127.0.0.1:{port}/", "batch_size": 1, "concurrency": in_flight}
    url = f"http://127.0.0.1:{port}/v1"
    bounds = {"concurrency": in_flight, "max_concurrency": in_flight, "cache_size": 0}
    return {"urls": url, "model": "judge", "rubric": "alignment", **bounds}


def _made(scorer: str, settings: Mapping[str, Any]) -> AsyncScorer[Any]:
    if scorer == "vlm":
        return VlmScorer(VlmSettings.read(settings), JudgeMetrics(CollectorRegistry()))
    return HttpScorer(HttpSettings.read(settings))


class _Ways:
    """The three ways to ask the server."""

    def __init__(
        self,
        scorer: str,
        settings: Mapping[str, Any],
        port: int,
        address: str,
        samples: Sequence[EncodedSample],
        processes: Sequence[psutil.Process],
        options: argparse.Namespace,
    ) -> None:
        self._scorer = _made(scorer, settings)
        self._params = self._scorer.parse({})
        self._port = port
        self._address = address
        self._samples = samples
        self._processes = [psutil.Process(), *processes]
        self._options = options

    async def rounds(self) -> list[tuple[Press, Press, Press]]:
        """Measures the bare call, the scorer itself and its service."""
        await self._scorer.start()
        async with open_channel(self._address) as channel:
            score = score_method(channel)

            async def service(sample: EncodedSample) -> None:
                response = await score(ScoreCall([sample]).write(), timeout=DEADLINE_S)
                assert response.scores[0].WhichOneof("outcome") == "score", response.scores[0].error

            pressed = []
            for _ in range(self._options.rounds):
                bare, close = await self._bare()
                first = await self._pressed(bare)
                close()
                pressed.append((first, await self._pressed(self._direct), await self._pressed(service)))
        await self._scorer.close()
        return pressed

    async def _direct(self, sample: EncodedSample) -> None:
        (outcome,) = await self._scorer.score([sample], self._params)
        assert isinstance(outcome, Score), outcome

    async def _bare(self) -> tuple[Way, Callable[[], None]]:
        """Over a connection for each question under way."""
        body = chat_request("judge", "", [Picture.of(self._samples[0].media, "image/png"), "?"], {}).body
        request = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        free = [await asyncio.open_connection("127.0.0.1", self._port) for _ in range(self._options.in_flight)]
        writers = [writer for _, writer in free]

        async def ask(sample: EncodedSample) -> None:
            reader, writer = connection = free.pop()
            writer.write(request)
            await reader.readexactly(len(ANSWER))
            free.append(connection)

        def close() -> None:
            for writer in writers:
                writer.close()

        return ask, close

    async def _pressed(self, way: Way) -> Press:
        answered = 0
        asking = True

        async def keep_asking(place: int) -> None:
            nonlocal answered
            while asking:
                await way(self._samples[place % len(self._samples)])
                answered += 1
                place += 1

        workers = asyncio.gather(*(keep_asking(place) for place in range(self._options.in_flight)))
        await asyncio.sleep(WARM_UP_S + 2 * self._options.latency_ms / 1000)
        start, number, spent = time.perf_counter(), answered, self._cpu_seconds()
        await asyncio.sleep(self._options.seconds)
        seconds, number = time.perf_counter() - start, answered - number
        cpu_ms = {pid: 1000 * (late - spent[pid]) / number for pid, late in self._cpu_seconds().items()}
        asking = False
        await workers
        return Press(number / seconds, cpu_ms)

    def _cpu_seconds(self) -> dict[int, float]:
        own, *others = self._processes
        return {own.pid: sum(own.cpu_times()[:2]), **{other.pid: cpu_seconds(other) for other in others}}


def _figures(
    scorer: str,
    samples: Sequence[EncodedSample],
    options: argparse.Namespace,
    rounds: Sequence[tuple[Press, Press, Press]],
    server: int,
    service: int,
) -> Figures:
    limit = 1000 * options.in_flight / options.latency_ms
    bare, direct, served = (statistics.median(turn[way].rate for turn in rounds) for way in range(3))

    def of_bare(way: int) -> float:
        return statistics.median(turn[way].rate / turn[0].rate for turn in rounds)

    def cpu_ms(way: int, process: int) -> float:
        return statistics.median(turn[way].cpu_ms[process] for turn in rounds)

    return Figures(
        scorer=scorer,
        media=samples[0].media_type,
        kilobytes=statistics.mean(len(sample.media) for sample in samples) / 1000,
        latency_ms=options.latency_ms,
        in_flight=options.in_flight,
        limit=limit,
        bare_rate=bare,
        scorer_rate=direct,
        service_rate=served,
        scorer_of_limit=direct / limit,
        service_of_limit=served / limit,
        scorer_of_bare=of_bare(1),
        service_of_bare=of_bare(2),
        bare_cpu_ms=cpu_ms(0, os.getpid()),
        scorer_cpu_ms=cpu_ms(1, os.getpid()),
        service_cpu_ms=cpu_ms(2, service),
        caller_cpu_ms=cpu_ms(2, os.getpid()),
        server_cpu_ms=cpu_ms(1, server),
    )


def _line(row: Figures) -> str:
    return (
        f"{row.scorer:<5} {row.media:<10} {row.kilobytes:.0f} kB, {row.latency_ms:.0f} ms: of {row.limit:.0f} a second "
        f"bare {row.bare_rate:.0f}, scorer {row.scorer_rate:.0f} (× {row.scorer_of_limit:.3f}, of bare "
        f"{row.scorer_of_bare:.3f}), service {row.service_rate:.0f} (× {row.service_of_limit:.3f}, of bare "
        f"{row.service_of_bare:.3f}); CPU ms: bare {row.bare_cpu_ms:.2f}, scorer {row.scorer_cpu_ms:.2f}, service "
        f"{row.service_cpu_ms:.2f} and its caller {row.caller_cpu_ms:.2f}, server {row.server_cpu_ms:.2f}"
    )


if __name__ == "__main__":
    main()
