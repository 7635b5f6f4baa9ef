"""The Python client of Flowfleet: all that the command line does, and nothing that it cannot.

    with Client() as client:
        job = client.submit(Path("recipes/tiny_ocr.toml"))
        for event in client.events(job.id):
            print(event.type, event.data)
        print(client.job(job.id).results)

Each method is that of `AsyncClient`, whose docstrings describe them; iterators ask the controller as they are read.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import cache, partial, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, Self, TypeVar

import httpx

from flowfleet.api.samples import Sample
from flowfleet.client.asynchronous import AsyncClient
from flowfleet.client.connection import TIMEOUT_S

P = ParamSpec("P")
T = TypeVar("T")


def run(work: Awaitable[T]) -> T:
    """Waits for the result. An interrupt of the caller, such as Ctrl-C, cancels the work."""

    async def awaited() -> T:
        return await work

    future = asyncio.run_coroutine_threadsafe(awaited(), _loop())
    try:
        return future.result()
    finally:
        future.cancel()


def each(items: AsyncIterator[T]) -> Iterator[T]:
    """Yields the items, each asked for when the caller wants it."""
    try:
        while (item := run(anext(items, None))) is not None:
            yield item
    except GeneratorExit:
        # Not waited for: a forgotten iterator may be collected at exit, when the loop's thread no longer runs.
        asyncio.run_coroutine_threadsafe(_close(items), _loop())
        raise


async def _close(items: AsyncIterator[object]) -> None:
    await items.aclose()  # type: ignore[attr-defined]  # all are asynchronous generators


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="flowfleet-portal", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_loop.cache_clear)  # a fork has no thread but the one that forked


def blocking(method: Callable[Concatenate[AsyncClient, P], Awaitable[T]]) -> Callable[Concatenate[Client, P], T]:
    """Makes a method of `Client` from one of `AsyncClient`; type checkers see the same parameters."""

    @wraps(method)
    def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(client.asynchronous, *args, **kwargs))

    return call


def iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncIterator[T]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    """Makes a method of `Client` that iterates from one of `AsyncClient`."""

    @wraps(method)
    def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return each(method(client.asynchronous, *args, **kwargs))

    return call


class Client:
    """Client of the REST API. Its connection pool closes at the end of a `with` block. Without a URL it uses
    FLOWFLEET_URL, else this machine's stack. For https URLs, `ca` (else FLOWFLEET_CA) is the PEM file of a private CA,
    trusted instead of the system's. `transport` is for tests.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        ca: Path | str | None = None,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.asynchronous = AsyncClient(url, api_key, ca=ca, timeout_s=timeout_s, transport=transport)
        self.url, self.has_key = self.asynchronous.url, self.asynchronous.has_key

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    close = blocking(AsyncClient.aclose)

    @property
    def on_this_machine(self) -> bool:
        """The controller is reached by loopback."""
        return self.asynchronous.on_this_machine

    @property
    def same_files(self) -> bool:
        """The controller sees the files of this process. Asks it, for loopback may be a forwarded port."""
        return run(self.asynchronous.same_files)

    submit = blocking(AsyncClient.submit)
    sweep = blocking(AsyncClient.sweep)
    upload = blocking(AsyncClient.upload)
    jobs = iterating(AsyncClient.jobs)
    rows = iterating(AsyncClient.rows)
    sweep_jobs = blocking(AsyncClient.sweep_jobs)
    job = blocking(AsyncClient.job)
    find = blocking(AsyncClient.find)
    cancel = blocking(AsyncClient.cancel)
    pause = blocking(AsyncClient.pause)
    resume = blocking(AsyncClient.resume)
    finish = blocking(AsyncClient.finish)
    extend = blocking(AsyncClient.extend)
    prioritize = blocking(AsyncClient.prioritize)
    attach = blocking(AsyncClient.attach)
    profile = blocking(AsyncClient.profile)
    profiles = blocking(AsyncClient.profiles)
    delete = blocking(AsyncClient.delete)
    wait = blocking(AsyncClient.wait)

    rewards = blocking(AsyncClient.rewards)
    change_rewards = blocking(AsyncClient.change_rewards)
    wait_for_rewards = blocking(AsyncClient.wait_for_rewards)

    events = iterating(AsyncClient.events)
    metrics = iterating(AsyncClient.metrics)
    checkpoints = iterating(AsyncClient.checkpoints)
    media = blocking(AsyncClient.media)
    image = blocking(AsyncClient.image)
    metrics_frame = blocking(AsyncClient.metrics_frame)
    samples_frame = blocking(AsyncClient.samples_frame)
    sweep_frame = blocking(AsyncClient.sweep_frame)

    def samples(
        self, job_id: str, *, purpose: str = "train", step: int | None = None, order: str = "newest"
    ) -> Iterator[Sample]:
        """Samples with prompts and scores, whose `image()` gives the picture; `order`: newest, oldest, best, worst."""
        for sample in each(self.asynchronous.samples(job_id, purpose=purpose, step=step, order=order)):
            yield sample.showing(partial(self.image, job_id, sample))

    model = blocking(AsyncClient.model)
    download_model = blocking(AsyncClient.download_model)

    fleet = blocking(AsyncClient.fleet)
    version = blocking(AsyncClient.version)

    next_votes = blocking(AsyncClient.next_votes)
    vote = blocking(AsyncClient.vote)
    side = blocking(AsyncClient.side)
    ask_votes = blocking(AsyncClient.ask_votes)
    votes = iterating(AsyncClient.votes)
    vote_report = blocking(AsyncClient.vote_report)
    preferences = blocking(AsyncClient.preferences)
    export_preferences = blocking(AsyncClient.export_preferences)
