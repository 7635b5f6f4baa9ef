"""A console on which text of others stays text: prompts, what judges say, reasons."""

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys: control characters such as ESC, but for tabs and line ends, and marks that turn the
direction of text, so that it reads as other text."""


class Terminal(Console):
    """Strips control characters from whatever it shows, and takes no text for rich's markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(_OBEYED.sub("", segment.text), segment.style)


def escaped(json: bytes) -> str:
    """JSON with the control characters that it may hold as they are, in its escapes."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.decode())
