"""Certificates for a fleet that makes its own: an authority that lives as long as one start of the fleet.

Its key is never written, so nothing can be signed later. Each kind of service gets a folder as FLOWFLEET_TLS_DIR names
one (tls.py), with the DNS names of its kind.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from flowfleet.rpc.kinds import KINDS
from flowfleet.rpc.tls import DEFAULT_NAME

EARLIER: Final = datetime.timedelta(days=1)
"""Machines whose clocks are a little behind take the certificates as well."""
VALID: Final = datetime.timedelta(days=365)


def write_certificates(folder: Path, hosts: Iterable[str]) -> None:
    """Writes `folder/KIND/{ca.crt,tls.crt,tls.key}` for each kind of service. `hosts`: names and addresses by which
    clients reach the controller and Redis."""
    key, name = ec.generate_private_key(ec.SECP256R1()), _name(f"authority {secrets.token_hex(8)} of Flowfleet")
    ca = _certificate(name, name, key.public_key())
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    ca_pem = ca.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    for kind in KINDS:
        own = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(DEFAULT_NAME), x509.DNSName(f"{kind}.{DEFAULT_NAME}")]
        reached = map(_general, hosts) if kind in ("controller", "redis") else ()
        made = _certificate(_name(f"{kind} of Flowfleet"), name, own.public_key())
        made = made.add_extension(x509.SubjectAlternativeName([*names, *reached]), critical=False)
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        made = made.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        place = folder / kind
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(place / "ca.crt", ca_pem)
        _write(place / "tls.crt", made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        _write(place / "tls.key", _pem(own))


def _certificate(name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(issuer, name, key, x509.random_serial_number())
    return builder.not_valid_before(now - EARLIER).not_valid_after(now + VALID)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    nothing = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, nothing)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, data: bytes) -> None:
    """Readable by its owner alone, from the first byte on."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
