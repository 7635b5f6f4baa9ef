"""Job ids: UUID version 7 (RFC 9562), so that sorting by id is sorting by time of submission."""

from __future__ import annotations

import secrets
import time
import uuid


def submitted_at(job_id: str) -> float:
    """Seconds since the epoch at which an id was made."""
    return (uuid.UUID(job_id).int >> 80) / 1000


def new_job_id(time_ns: int | None = None) -> str:
    """48 bits of milliseconds, 12 bits of the fraction of one (RFC 9562 §6.2 method 3), 62 random bits."""
    milliseconds, rest_ns = divmod(time.time_ns() if time_ns is None else time_ns, 1_000_000)
    fraction = rest_ns * 4096 // 1_000_000
    value = (milliseconds & (1 << 48) - 1) << 80 | 0x7 << 76 | fraction << 64 | 0b10 << 62 | secrets.randbits(62)
    return str(uuid.UUID(int=value))
