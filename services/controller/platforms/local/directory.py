"""Rewards of the controller's flags and of a file; rollouts announce themselves."""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flowfleet.local.files import Watched
from flowfleet.process.service import check_address
from flowfleet.text_files import read_text

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9._-]+")


class StaticDirectory:
    """The rewards of the controller's flags and of a file, which is read again when it changes; rollouts announce
    themselves in whatever pool they are.

    The file is TOML: a name and "host:port" a line. Who may write it says whom the controller calls; a client of the
    REST API only chooses among these names. While the file cannot be read, what it said last holds.
    """

    pools: Collection[str] | None = None

    def __init__(self, rewards: Mapping[str, str], file: Path | None = None) -> None:
        self._flags = dict(rewards)
        self._file = None if file is None else Watched(file)
        self._listed: Mapping[str, str] = {}

    @property
    def rewards(self) -> Mapping[str, tuple[str, ...]]:
        self._look()
        return {name: (address,) for name, address in {**self._flags, **self._listed}.items()}

    def _look(self) -> None:
        """The file wins over the flags."""
        if self._file is None or not self._file.has_changed():
            return
        try:
            self._listed = addresses(tomllib.loads(read_text(self._file.path)), str(self._file.path))
        except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
            log.error("rewards file not applied, its last valid content stays: %s", error)

    def shortage(self, component: str, name: str) -> str:
        return ""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def addresses(rewards: Mapping[str, Any], source: str) -> dict[str, str]:
    """Name → "host:port", as given. Raises ValueError, which names `source`, for one that is no such thing."""
    for name, address in rewards.items():
        if not _NAME.fullmatch(name) or not _is_address(address):
            raise ValueError(f"{source} {name}={address}: give NAME=HOST:PORT, as in ocr=127.0.0.1:7001")
    return dict(rewards)


def _is_address(address: Any) -> bool:
    try:
        return isinstance(address, str) and bool(check_address(address))
    except ValueError:
        return False
