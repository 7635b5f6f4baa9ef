"""The fleet's own certificates work with its TLS, for the kind that each is for and no stranger's."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography import x509

from flowfleet.rpc.authority import write_certificates
from flowfleet.rpc.kinds import KINDS, of_certificate
from flowfleet.rpc.tls import DEFAULT_NAME, Certificates


def test_each_kind_has_a_certificate_of_its_kind(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["node1", "10.0.0.1"])
    for kind in KINDS:
        Certificates(tmp_path / kind)  # shakes hands with itself
        made = x509.load_pem_x509_certificate((tmp_path / kind / "tls.crt").read_bytes())
        names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = [name.encode() for name in names.get_values_for_type(x509.DNSName)]
        assert of_certificate(found, DEFAULT_NAME) == [kind]
        assert (b"node1" in found) == (kind in ("controller", "redis"))
        assert (tmp_path / kind / "tls.key").stat().st_mode & 0o077 == 0


def test_another_start_trusts_no_certificate_of_the_last(tmp_path: Path) -> None:
    write_certificates(tmp_path / "old", [])
    write_certificates(tmp_path / "new", [])
    (tmp_path / "old" / "trainer" / "ca.crt").write_bytes((tmp_path / "new" / "trainer" / "ca.crt").read_bytes())
    with pytest.raises(ValueError, match="did not sign"):
        Certificates(tmp_path / "old" / "trainer")
    context = ssl.create_default_context(cafile=str(tmp_path / "new" / "redis" / "ca.crt"))
    assert context.verify_mode is ssl.CERT_REQUIRED
