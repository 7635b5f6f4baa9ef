"""Rights of API keys, sessions and uploads."""

from datetime import datetime
from enum import StrEnum

from flowfleet.api.answers import Answer


class Right(StrEnum):
    """Rights of an API key, ascending: each includes those before it."""

    LOOK = "look"  # read everything
    VOTE = "vote"  # judge samples as well
    ASK = "ask"  # ask people for votes as well, as the reward `human` does
    STEER = "steer"  # submit, steer and delete jobs as well


class Upload(Answer):
    """A prompt file that the controller keeps."""

    place: str
    """Names it in a job's data: `upload:SHA256/NAME`."""
    size_bytes: int


class Session(Answer):
    """Session of the caller: its name and rights."""

    login: bool
    """True if the controller asks for an API key."""
    name: str = ""
    """Holder of the key."""
    may: Right | None = None
    """Null without a valid key or session."""
    expires_at: datetime | None = None
    """End of a browser's session."""
