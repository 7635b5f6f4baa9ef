"""Answers in text: files of the media type "text/plain", which are UTF-8."""

from dataclasses import dataclass
from typing import Final

from flowfleet.media.files import MediaError

TEXT_TYPE: Final = "text/plain"
MAX_TEXT_BYTES: Final = 2**20
"""Maximum size of one answer."""


@dataclass(frozen=True)
class OpenedText:
    """A text, and the file that it was decoded from."""

    data: bytes
    text: str

    num_pixels = 0
    media_type = TEXT_TYPE


def open_text(data: bytes, max_bytes: int = MAX_TEXT_BYTES) -> OpenedText:
    """Decodes a text. Raises MediaError for one that is too large or not UTF-8."""
    if len(data) > max_bytes:
        raise MediaError("too_large", f"the text has {len(data)} bytes: send at most {max_bytes}")
    try:
        return OpenedText(data, data.decode())
    except UnicodeDecodeError as error:
        raise MediaError("undecodable", f"the {len(data)} bytes of text are not UTF-8: {error}") from None
