"""Server-sent events, as far as a client needs them (html.spec.whatwg.org, server-sent-events)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSentEvent:
    """`id` is the last one sent, which an event without its own inherits."""

    id: str
    type: str
    data: str


def parse_events(lines: Iterable[str]) -> Iterator[ServerSentEvent]:
    """Reads events from lines without their ends. An event cut off before its blank line is not given."""
    last_id, kind, data = "", "message", list[str]()
    for line in lines:
        if not line:
            if data:
                yield ServerSentEvent(last_id, kind, "\n".join(data))
            kind, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id" and "\0" not in value:
            last_id = value
        elif field == "event":
            kind = value
        elif field == "data":
            data.append(value)
