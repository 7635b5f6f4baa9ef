"""Sizes that a job's data are held to: by the controller when a job is submitted, and by each service it calls.

One place for both, so that the fleet can run whatever a submit accepts.
"""

from typing import Final

MAX_PROMPT_BYTES: Final = 32 * 1024
"""UTF-8 bytes of a prompt, and of a negative prompt. Text encoders truncate at a few thousand characters."""
MAX_METADATA_BYTES: Final = 2 * 2**20
"""UTF-8 bytes of the metadata of a prompt, keys and values. A judge's source picture fits as a data URL."""
MAX_IMAGES: Final = 8
"""Condition images of a prompt."""
MAX_MEDIA_BYTES: Final = 2**28
"""Bytes of a picture or video file."""
MAX_BLOB_BYTES: Final = 2**40
"""Bytes of a blob, which a reference states before anybody has seen it."""


def check_bytes(what: str, size_bytes: int, limit_bytes: int) -> None:
    """Raises ValueError that names `what` if it is larger than its limit."""
    if size_bytes > limit_bytes:
        raise ValueError(f"{what} has {size_bytes} bytes: give at most {limit_bytes}")
