"""How much of a judge server's own throughput the scorer `vlm` reaches.

    python -m bench.judge --latency-ms 200 --in-flight 64 --samples 2000

A server in a process of its own answers every question after a fixed time, so many at once and no more: by Little's law
it can give in_flight / latency answers a second. Beside the scorer a bare client on raw sockets is measured, with the
same bodies made beforehand: what this machine lets any client reach. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from prometheus_client import CollectorRegistry

from services.reward.judge.media import Picture
from services.reward.judge.messages import chat_request
from services.reward.judge.metrics import JudgeMetrics
from services.reward.judge.settings import VlmSettings
from services.reward.scorers.base import EncodedSample, Score
from services.reward.scorers.vlm import VlmScorer

_TOP = [{"token": "Yes", "logprob": -0.2}, {"token": "No", "logprob": -2.0}]
_CHOICE = {"message": {"content": "Yes"}, "logprobs": {"content": [{**_TOP[0], "top_logprobs": _TOP}]}}
_BODY = json.dumps({"choices": [_CHOICE], "usage": {"prompt_tokens": 400, "completion_tokens": 1}}).encode()
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_BODY) + _BODY


def serve(latency_s: float, in_flight: int, ready: Connection) -> None:
    """Runs the server until its process is ended; sends its port first."""

    async def body() -> None:
        places = asyncio.Semaphore(in_flight)

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    await _read_request(reader)
                    async with places:
                        await asyncio.sleep(latency_s)
                    writer.write(_ANSWER)
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=2**22)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(body())


async def _read_request(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))


async def measure_scorer(url: str, samples: Sequence[EncodedSample], in_flight: int) -> float:
    """Seconds for all samples, each a call of its own."""
    given = {"urls": url, "model": "judge", "rubric": "alignment", "concurrency": in_flight, "cache_size": 0}
    settings = VlmSettings.read(given | {"max_concurrency": in_flight, "hedge_share": 0.0, "deadline_s": 3600})
    scorer = VlmScorer(settings, JudgeMetrics(CollectorRegistry()))
    await scorer.start()
    waiting = iter(samples)

    async def work() -> None:
        for sample in waiting:
            (outcome,) = await scorer.score([sample], ())
            assert isinstance(outcome, Score), outcome

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    seconds = time.perf_counter() - began
    await scorer.close()
    return seconds


async def measure_bare(port: int, samples: Sequence[EncodedSample], in_flight: int) -> float:
    """Seconds for all samples over raw sockets, their bodies made beforehand."""
    body = chat_request("judge", "", [Picture.of(samples[0].media, "image/png"), "?"], {}).body
    request = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    waiting = iter(samples)

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in waiting:
            writer.write(request)
            await writer.drain()
            await _read_request(reader)
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    return time.perf_counter() - began


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Answers a second: of the server by Little's law, of the bare client, and of the scorer."""
    draw = random.Random(0)
    media = [draw.randbytes(options.size_kb * 1024) for _ in range(16)]
    samples = [EncodedSample(media[n % 16], "image/png", f"prompt {n}") for n in range(options.samples)]
    here, there = multiprocessing.Pipe()
    arguments = (options.latency_ms / 1000, options.in_flight, there)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=arguments, daemon=True)
    server.start()
    port = here.recv()
    try:
        bare_s = asyncio.run(measure_bare(port, samples, options.in_flight))
        scorer_s = asyncio.run(measure_scorer(f"http://127.0.0.1:{port}/v1", samples, options.in_flight))
    finally:
        server.terminate()
        server.join()
    limit = options.in_flight / (options.latency_ms / 1000)
    bare, scorer = options.samples / bare_s, options.samples / scorer_s
    return {
        "server_per_s": limit,
        "bare_per_s": round(bare, 1),
        "vlm_per_s": round(scorer, 1),
        "vlm_of_server": round(scorer / limit, 3),
        "vlm_of_bare": round(scorer / bare, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, default=200.0)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--size-kb", type=int, default=400, help="of a picture; a PNG of 512 x 512 has about 400")
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
