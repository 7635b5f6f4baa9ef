"""API keys: whose they are, and what they may do.

FLOWFLEET_API_KEY is the operator's key and may do everything. `--keys-file` adds one key per person, and is read again
when it changes, so a removed key opens nothing from the next request on:

    [ann]
    sha256 = "…"     # printf %s KEY | sha256sum
    may = "steer"    # look, vote, ask, or steer

The file holds digests, so whoever reads it cannot use the keys.
"""

import hashlib
import logging
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowfleet.api.access import Right
from flowfleet.text_files import read_text
from services.controller.api.throttle import Throttle

log = logging.getLogger(__name__)

OPERATOR = "operator"
"""Name of the holder of FLOWFLEET_API_KEY."""
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Holder:
    """Sender of a request."""

    name: str
    may: Right
    digest: str = ""
    """SHA-256 of the key; empty on a controller without keys."""
    session: str = ""
    """Key of the session in Redis, where a cookie proved it."""


ANYONE = Holder("", Right.STEER)
"""Sender of a request to a controller without keys, which answers programs of its machine alone."""


class Keys:
    """The keys of a controller. Raises ValueError for a file that cannot be read at the start."""

    def __init__(self, api_key: str | None, file: Path | None = None) -> None:
        self._own = {} if api_key is None else {digest_of(api_key): Holder(OPERATOR, Right.STEER, digest_of(api_key))}
        self._file = file
        self._throttle = Throttle()
        self._seen: tuple[int, int] | None = None
        self._listed: Mapping[str, Holder] = {}
        if file is not None:
            _check(file)

    @property
    def required(self) -> bool:
        """True if requests need a key."""
        return bool(self._own) or self._file is not None

    def holder(self, key: str) -> Holder | None:
        """The key's holder, None for one that opens nothing. Compares digests, so the time taken tells nothing."""
        return self.by_digest(digest_of(key))

    async def checked(self, key: str, address: str) -> Holder | None:
        """The key's holder, as `holder` gives it. Slows down wrong keys alone, because a proxy gives all callers one
        address; raises HTTPException 429 for one of many."""
        if (found := self.holder(key)) is None:
            await self._throttle.note_wrong(address)
        return found

    def by_digest(self, digest: str) -> Holder | None:
        self._look()
        return self._own.get(digest) or self._listed.get(digest)

    def _look(self) -> None:
        """Keeps what the file said last while it cannot be read. A file that is gone holds no key."""
        if self._file is None:
            return
        try:
            stat = self._file.stat()
        except OSError:
            self._listed, self._seen = {}, None
            return
        if (seen := (stat.st_mtime_ns, stat.st_size)) == self._seen:
            return
        self._seen = seen
        try:
            self._listed = read_keys(self._file)
        except (OSError, ValueError) as error:
            log.error("keys file not applied, its last valid content stays: %s", error)


def _check(file: Path) -> None:
    try:
        read_keys(file)
    except OSError as error:
        raise ValueError(f"--keys-file {file} cannot be read: {error.strerror}") from None


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_keys(file: Path) -> dict[str, Holder]:
    """Digest → holder. Raises OSError and ValueError."""
    found: dict[str, Holder] = {}
    for name, entry in tomllib.loads(read_text(file)).items():
        holder = _holder(name, entry, file)
        if holder.digest in found:
            raise ValueError(f"{file}: {name} and {found[holder.digest].name} have the same key: give each its own")
        found[holder.digest] = holder
    return found


def _holder(name: str, entry: Any, file: Path) -> Holder:
    known = entry if isinstance(entry, dict) else {}
    digest, may = known.get("sha256"), known.get("may")
    if not _NAME.fullmatch(name) or name == OPERATOR:
        raise ValueError(f"{file}: {name!r} cannot name a key: use up to 64 letters, digits and ._@-, not {OPERATOR!r}")
    if known.keys() - {"sha256", "may"} or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{file}: {name}: give sha256 (64 hex digits of `printf %s KEY | sha256sum`) and may alone")
    if may not in tuple(Right):
        raise ValueError(f"{file}: {name}: may is one of {', '.join(Right)}, not {may!r}")
    return Holder(name, Right(may), digest)
