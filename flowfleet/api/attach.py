"""How a trainer's ranks that somebody else starts announce themselves to the controller."""

from typing import Literal

from pydantic import Field

from flowfleet.api.answers import Answer
from flowfleet.part import Part

TOKEN = "FLOWFLEET_ATTACH_TOKEN"
"""Environment variable of such ranks: the token of their job."""
End = Literal["", "drain", "now"]


class Announcement(Part):
    """A rank's sign of life, sent every second."""

    token: str = Field(max_length=400)
    version: str = Field(max_length=100)
    """Version of the rank's package."""
    rank: int = Field(ge=0, le=4095)
    world_size: int = Field(ge=1, le=4096)
    meets_at: str = Field(default="", max_length=600)
    """Names the set of ranks: where they meet, and their torchrun's run; empty for one rank alone."""
    process: str = Field(max_length=100)
    """Another one in each process."""
    attempt: int = Field(default=0, ge=0)
    """Number that the controller gave; 0: none yet."""
    address: str = Field(default="", max_length=300)
    """Rank 0's gRPC server, once it answers."""
    left: bool = False
    """The process ends."""
    words: str = Field(default="", max_length=2000)
    """Why, by its own account."""


class Attached(Answer):
    attempt: int
    environment: dict[str, str] = {}
    """Given once: what proves the rank, and where Redis is."""
    end: End = ""
    """drain: rank 0 ends as on SIGTERM, and the others with it. now: every rank ends at once."""


class AttachCommand(Answer):
    token: str
    """Lets its holder train this job, until the job ends."""
    command: str
    """Starts the ranks on one machine."""
