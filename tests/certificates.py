"""Certificates of a private CA, as a folder that FLOWFLEET_TLS_DIR can name."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

NAMES = ("flowfleet", "localhost", "127.0.0.1")


class Authority:
    """A CA. Each call of `issue` makes another certificate."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    @property
    def pem(self) -> bytes:
        return self._ca.cert_pem.bytes()

    def issue(
        self, directory: Path, *names: str, expired: bool = False, trusted: Authority | None = None, days: int = 30
    ) -> Path:
        """Writes the three files, whole or not at all, and returns the folder. `trusted`: another CA for ca.crt."""
        now = datetime.now(UTC)
        ends = now - timedelta(days=1) if expired else now + timedelta(days=days)
        made = self._ca.issue_cert(*(names or NAMES), not_before=now - timedelta(days=2), not_after=ends)
        directory.mkdir(exist_ok=True)
        for name, content in (
            ("ca.crt", (trusted or self).pem),
            ("tls.crt", b"".join(pem.bytes() for pem in made.cert_chain_pems)),
            ("tls.key", made.private_key_pem.bytes()),
        ):
            aside = directory / f".{name}"
            aside.write_bytes(content)
            os.replace(aside, directory / name)
        return directory
