"""Server-sent events, as far as a client needs them (html.spec.whatwg.org, server-sent-events)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSentEvent:
    """`id` is the last one sent, which an event without its own inherits."""

    id: str
    type: str
    data: str


class EventParser:
    """Reads events from a stream's text, in pieces as they come. An event cut off before its blank line is not given.

    Only line feeds end a line, as the controller sends them: JSON may hold every other separator, such as U+2028.
    """

    def __init__(self) -> None:
        self._rest, self._last_id, self._type, self._data = "", "", "message", list[str]()

    def feed(self, text: str) -> Iterator[ServerSentEvent]:
        """Events that this piece ends."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line:
                self._take(line)
                continue
            if self._data:
                yield ServerSentEvent(self._last_id, self._type, "\n".join(self._data))
            self._type, self._data = "message", []

    def _take(self, line: str) -> None:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id" and "\0" not in value:
            self._last_id = value
        elif field == "event":
            self._type = value
        elif field == "data":
            self._data.append(value)
