"""Requests to the REST API: retries while a controller is unreachable, pages, events, bodies as they come."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from flowfleet.api.answers import Answer, read
from flowfleet.api.jobs import JobEvent
from flowfleet.backoff import retry_after_s
from flowfleet.client.connection import (
    AWAY,
    PAGE_SIZE,
    RETRY_DELAYS_S,
    STREAM_SILENCE_S,
    TIMEOUT_S,
    checked,
    is_loopback,
    place_and_key,
    trusting,
    unreachable,
)


async def event_data(pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    """The data of the events in a stream's text, whose other fields they repeat. One cut off before its blank line is
    not given.

    Only line feeds end a line, as the controller sends them: JSON may hold every other separator, such as U+2028.
    """
    rest, data = "", list[str]()
    async for text in pieces:
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            field, _, value = line.partition(":")
            if field == "data":
                data.append(value.removeprefix(" "))
            elif not line and data:
                yield "\n".join(data)
                data = []


T = TypeVar("T", bound=Answer)
Query = dict[str, str | int]


class AsyncTransport:
    """Sends a client's requests over a connection pool, which `async with` closes. `transport` is for tests."""

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        ca: Path | str | None = None,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url, key = place_and_key(url, api_key)
        self.has_key = bool(key)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s,
            transport=transport,
            verify=trusting(ca),
            trust_env=not self.on_this_machine,  # no proxy stands between here and loopback
        )
        self._reached = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    @property
    def on_this_machine(self) -> bool:
        """True if the controller's URL is a loopback address."""
        return is_loopback(self.url)

    async def _get(self, path: str, query: Query | None = None) -> httpx.Response:
        return await self._call("GET", path, params=query or {})

    async def _pages(self, path: str, kind: type[T], query: Query) -> AsyncIterator[T]:
        query = {"limit": PAGE_SIZE, **query}
        while True:
            page = (await self._get(path, query)).json()
            for item in page["items"]:
                yield read(kind, item)
            if not page.get("next_cursor"):
                return
            query["cursor"] = page["next_cursor"]

    async def _call(self, method: str, path: str, **parts: Any) -> httpx.Response:
        """Sends one request; retries while a controller that answered before is unreachable or slows requests down."""
        waiting = (*AWAY, *([httpx.codes.TOO_MANY_REQUESTS] if self._reached else ()))
        for delay_s in (*RETRY_DELAYS_S, None):
            asked_s = 0.0
            try:
                response = await self._http.request(method, path, **parts)
            except httpx.TransportError as error:
                if delay_s is None or not self._reached:
                    raise unreachable(self.url, error) from None
            else:
                self._reached = True
                if response.status_code not in waiting or delay_s is None:
                    return checked(response)
                asked_s = retry_after_s(response.headers.get("retry-after")) or 0.0
            assert delay_s is not None
            await asyncio.sleep(max(delay_s, asked_s))
        raise AssertionError("the last try returns or raises")

    async def _stream(self, path: str, after: str | None) -> AsyncIterator[JobEvent]:
        headers = {"accept": "text/event-stream", **({"last-event-id": after} if after else {})}
        timeout = httpx.Timeout(TIMEOUT_S, read=STREAM_SILENCE_S)
        async with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
            self._reached = True
            if response.is_error:
                await response.aread()
            checked(response)
            async for data in event_data(response.aiter_text()):
                yield read(JobEvent, data)

    @asynccontextmanager
    async def _bytes(self, path: str, query: Query) -> AsyncIterator[AsyncIterator[bytes]]:
        """The body of an answer as it comes."""
        try:
            async with self._http.stream("GET", path, params=query) as response:
                if response.is_error:
                    await response.aread()
                yield checked(response).aiter_bytes()
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from None
