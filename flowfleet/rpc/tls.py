"""Mutual TLS of the fleet: one folder of PEM files, read again when they change.

FLOWFLEET_TLS_DIR holds ca.crt, tls.crt and tls.key, as cert-manager and Kubernetes secrets of type tls write them. Set,
every gRPC server and channel of the fleet speaks TLS, both ends show a certificate that ca.crt signed and that carries
the DNS name FLOWFLEET_TLS_NAME (replicas are reached by addresses, which no certificate can list), and the controller
serves HTTPS.

What is read is tried first: the certificate shakes hands with itself, in memory, as server and as client. So a key of
another certificate, a wrong name, CA or purpose, or an expired certificate is an error at the start; while
running, such files are logged and the last good ones stay in use.
"""

import contextlib
import functools
import logging
import os
import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TLS_DIR: Final = "FLOWFLEET_TLS_DIR"
TLS_NAME: Final = "FLOWFLEET_TLS_NAME"
DEFAULT_NAME: Final = "flowfleet"
FILES: Final = ("ca.crt", "tls.crt", "tls.key")
_PROBE_S: Final = 2.0
_NO_PASSWORD: Final = "-"  # for an encrypted key, which else would be asked for on the terminal

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Identity:
    """Certificate of a process, its key, and the authority that it trusts; all PEM."""

    ca: bytes
    chain: bytes
    key: bytes
    valid_until: str
    """End of the certificate's life, as "Jun  1 12:00:00 2027 GMT"."""


class Certificates:
    """The files of a folder. Thread-safe."""

    def __init__(self, directory: Path, name: str = DEFAULT_NAME) -> None:
        """ValueError for files that cannot work, naming the one to change."""
        self.directory = directory
        self.name = name
        self._lock = threading.Lock()
        self._bad_stamp: object = None
        self._complaint = ""
        self._stamp = self._stat()
        self._identity = self._read()
        log.info("TLS as %s, certificate valid until %s", name, self._identity.valid_until)

    def path(self, name: str) -> Path:
        return self.directory / name

    def current(self) -> Identity:
        """Returns the last good files; the same object while they have not changed."""
        with self._lock:
            try:
                self._renew()
            except ValueError as error:
                if self._complaint != (complaint := str(error)):
                    log.warning("TLS certificates not renewed, the last valid ones stay: %s", complaint)
                self._complaint = complaint
            return self._identity

    def load_pair(self, context: ssl.SSLContext) -> None:
        """Certificate and key for Python's own TLS. ValueError as the constructor's."""
        chain, key = self.path("tls.crt"), self.path("tls.key")
        try:
            context.load_cert_chain(chain, key, password=_NO_PASSWORD)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ValueError(f"{key} is not the key of {chain}") from None
            raise ValueError(f"{chain} and {key} are no PEM certificate and unencrypted key ({error.reason})") from None
        except OSError as error:
            raise ValueError(f"{TLS_DIR}: {error.filename or key} cannot be read ({error.strerror})") from None

    def _renew(self) -> None:
        stamp = self._stat()
        if stamp in (self._stamp, self._bad_stamp):
            return
        self._bad_stamp = stamp
        self._identity = self._read()
        self._stamp, self._complaint = stamp, ""
        log.info("TLS certificates renewed, valid until %s", self._identity.valid_until)

    def _stat(self) -> tuple[tuple[int, int], ...]:
        stats = []
        for name in FILES:
            try:
                status = self.path(name).stat()
            except OSError as error:
                raise ValueError(
                    f"{TLS_DIR}={self.directory}: {name} cannot be read ({error.strerror}); the folder must hold "
                    f"{', '.join(FILES)}"
                ) from None
            stats.append((status.st_mtime_ns, status.st_ino))
        return tuple(stats)

    def _read(self) -> Identity:
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        server.verify_mode = ssl.CERT_REQUIRED
        for context in (server, client):
            self.load_pair(context)
            try:
                context.load_verify_locations(self.path("ca.crt"))
            except ssl.SSLError as error:
                raise ValueError(f"{self.path('ca.crt')} holds no PEM certificate ({error.reason})") from None
        try:
            valid_until = _shake_hands(server, client, self.name)
        except ssl.SSLCertVerificationError as error:
            raise ValueError(
                f"{self.path('tls.crt')} cannot be used: {error.verify_message}{self._hint(error)}"
            ) from None
        ca, chain, key = (self.path(name).read_bytes() for name in FILES)
        return Identity(ca, chain, key, valid_until)

    def _hint(self, error: ssl.SSLCertVerificationError) -> str:
        """Returns advice where OpenSSL's own words do not say what to change."""
        if "ostname mismatch" in error.verify_message:
            return f" Add this DNS name to the certificate, or set {TLS_NAME} to one that it has"
        if "issuer" in error.verify_message or "self-signed" in error.verify_message:
            return f": {self.path('ca.crt')} did not sign it"
        if "purpose" in error.verify_message:
            return ": it must be for server and for client authentication"
        return ""


def from_env() -> Certificates | None:
    """The certificates of FLOWFLEET_TLS_DIR, None when it is unset. ValueError for files that cannot work."""
    directory = os.environ.get(TLS_DIR)
    return _certificates(directory, os.environ.get(TLS_NAME) or DEFAULT_NAME) if directory else None


@functools.cache
def _certificates(directory: str, name: str) -> Certificates:
    return Certificates(Path(directory), name)


def why_closed(address: str, certificates: Certificates | None) -> str | None:
    """Why a gRPC server closes connections: "host:port speaks TLS …"; None when TLS is not the reason. Blocks, at most
    for a few seconds."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent to it
    context.set_alpn_protocols(["h2"])
    if certificates is not None:
        certificates.load_pair(context)
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), _PROBE_S) as raw,
            context.wrap_socket(raw) as connection,
        ):
            if certificates is None:
                return f"{address} speaks TLS: set {TLS_DIR}"
            greeting = connection.recv(1)  # a server that takes our certificate begins with its settings
    except (OSError, ValueError):
        return None
    if greeting:
        return None
    return f"{address} refuses the certificate in {certificates.directory}: both must come from one CA and be valid"


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> str:
    """Both ends in memory; returns when the server's certificate ends."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(2):  # TLS 1.3 takes one and a half round trips
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    certificate = ends[0].getpeercert()
    assert certificate is not None
    return str(certificate["notAfter"])
