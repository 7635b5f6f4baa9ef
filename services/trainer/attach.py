"""A rank that somebody else started joins its job's trainer: it asks the controller for what it needs, and then tells
it every second that it is there. The controller answers when the rank must end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
import time
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx

from flowfleet.api.attach import TOKEN, Announcement, Attached
from flowfleet.client.connection import trusting
from flowfleet.process.service import TERMINATION_MESSAGE, is_loopback, secret

EVERY_S: Final = 1.0
_ASK_S: Final = 10.0
_GRACE_S: Final = 3.0
_SAY_S: Final = 60.0
"""From one word in the log to the next while the controller takes no ranks."""

log = logging.getLogger(__name__)


class Attachment:
    """This rank's, once `join` returned."""

    def __init__(self, url: str) -> None:
        """Raises ValueError without a token."""
        token = secret(TOKEN)
        if token is None:
            raise ValueError(f"--controller needs the token of a job in {TOKEN}: `flowfleet attach ID` prints it")
        self._place = urlsplit(url if "://" in url else f"http://{url}")
        self._client = httpx.Client(
            base_url=self._place.geturl(),
            verify=trusting(None),
            trust_env=not is_loopback(self._place.hostname or ""),
            timeout=_ASK_S,
        )
        where = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")]
        rank, world_size = (
            int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))
        )
        self._said = Announcement(
            token=token,
            version=version("flowfleet"),
            rank=rank,
            world_size=world_size,
            meets_at="/".join(where) if world_size > 1 else "",
            process=uuid.uuid4().hex,
        )

    @property
    def host(self) -> str:
        """This machine's address on the way to the controller."""
        port = self._place.port or (443 if self._place.scheme == "https" else 80)
        with socket.create_connection((self._place.hostname or "", port), _ASK_S) as connection:
            return str(connection.getsockname()[0])

    def join(self) -> None:
        """Waits until the controller takes this rank; then the environment has what a trainer needs. Raises ValueError
        where it never will."""
        said_at = -_SAY_S
        while True:
            try:
                answer = self._ask()
                break
            except (httpx.TransportError, _AskAgain) as error:
                if time.monotonic() - said_at > _SAY_S:
                    said_at = time.monotonic()
                    print(f"rank {self._said.rank} waits: {error}", flush=True)
            time.sleep(EVERY_S)
        given = answer.environment
        if os.environ.get("FLOWFLEET_REDIS_URL"):  # another way to the same Redis
            del given["FLOWFLEET_REDIS_URL"]
        os.environ.update(given)
        os.environ.setdefault(TERMINATION_MESSAGE, str(Path(tempfile.mkdtemp(prefix="flowfleet-")) / "words"))
        self._said = self._said.model_copy(update={"attempt": answer.attempt})
        threading.Thread(target=self._stay, name="attached", daemon=True).start()

    def serves(self, address: str) -> None:
        """Rank 0 answers calls there."""
        self._said = self._said.model_copy(update={"address": address})

    def leave(self) -> None:
        """Tells the controller that the process ends, and why."""
        words = ""
        with contextlib.suppress(OSError):
            words = Path(os.environ[TERMINATION_MESSAGE]).read_text(errors="replace")
        self._said = self._said.model_copy(update={"left": True, "words": words[:2000]})
        with contextlib.suppress(httpx.TransportError, _AskAgain, ValueError):
            self._ask()

    def _ask(self) -> Attached:
        response = self._client.post("/v1/attach", json=self._said.model_dump())
        if response.is_success:
            return Attached.model_validate_json(response.content)
        try:
            words = str(response.json()["detail"])
        except (ValueError, KeyError, TypeError):
            words = f"the controller answered {response.status_code}"
        raise _AskAgain(words) if response.status_code >= 500 or response.status_code == 429 else ValueError(words)

    def _stay(self) -> None:
        drains = False
        while not self._said.left:
            time.sleep(EVERY_S)
            with contextlib.suppress(httpx.TransportError, _AskAgain):
                try:
                    end = self._ask().end
                except ValueError as error:
                    log.error("%s", error)
                    os._exit(1)
                if end == "now" and not self._said.left:
                    time.sleep(_GRACE_S)  # rank 0 may have left because the job is done, and this rank is leaving too
                    log.error("the controller ends attempt %d", self._said.attempt)
                    self.leave()
                    os._exit(1)
                if end == "drain" and self._said.rank == 0 and not drains:
                    drains = True
                    os.kill(os.getpid(), signal.SIGTERM)


class _AskAgain(Exception):
    """The controller takes no ranks now."""


_joined: list[Attachment] = []
"""This process's, which it leaves however it ends."""


def join(url: str) -> Attachment:
    """Raises ValueError."""
    attachment = Attachment(url)
    attachment.join()
    _joined.append(attachment)
    return attachment


def leave() -> None:
    """Does nothing in a process that the controller started."""
    for attachment in _joined:
        attachment.leave()
