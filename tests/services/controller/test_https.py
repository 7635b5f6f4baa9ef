"""The REST API by HTTPS with a private CA, as the client and the command line reach it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowfleet.api.problems import ApiError
from flowfleet.client.client import Client
from tests.certificates import Authority
from tests.services.controller.test_process import IDLE, controller, stop

RENEWING = "tests.services.controller.serve_renewing"
KEY = "a-key-of-sixteen-characters"


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLOWFLEET_CA", "FLOWFLEET_API_KEY", "FLOWFLEET_URL", "FLOWFLEET_TLS_DIR", "FLOWFLEET_TLS_NAME"):
        monkeypatch.delenv(name, raising=False)


def refused(url: str, ca: Path | None) -> str:
    with Client(url, KEY, ca=ca) as client, pytest.raises(ApiError) as caught:
        client.version()
    return str(caught.value)


def test_the_ca_is_given_by_argument_by_flag_or_by_environment(redis_url: str, tmp_path: Path) -> None:
    ca, other = Authority(), Authority()
    files = ca.issue(tmp_path / "tls")
    env = {"FLOWFLEET_TLS_DIR": str(files), "FLOWFLEET_API_KEY": KEY}
    with controller(IDLE, redis_url, tmp_path, **env) as (process, address):
        url = f"https://{address}"
        with Client(url, KEY + "\n", ca=files / "ca.crt") as client:
            assert client.version()["version"]
        environment = {"FLOWFLEET_URL": url, "FLOWFLEET_API_KEY": KEY + "\n", "PATH": ""}
        command = [sys.executable, "-m", "flowfleet.cli.main", "jobs"]
        for flags, more in ((["--ca", str(files / "ca.crt")], {}), ([], {"FLOWFLEET_CA": str(files / "ca.crt")})):
            done = subprocess.run(
                [*command, *flags], env={**environment, **more}, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stderr
        assert "give the CA that signed it by --ca or FLOWFLEET_CA" in refused(url, None)
        assert "give the CA that signed it" in refused(url, other.issue(tmp_path / "other") / "ca.crt")
        assert "if it speaks TLS, use https://" in refused(f"http://{address}", None)
        assert stop(process)[0] == 0
    with controller(IDLE, redis_url, tmp_path) as (_, address):
        assert "it speaks no TLS: use http://" in refused(f"https://{address}", files / "ca.crt")
    with pytest.raises(ValueError, match="FLOWFLEET_CA, holds no PEM"):
        Client(url, ca=tmp_path / "absent")


def test_a_new_certificate_is_shown_without_a_restart(redis_url: str, tmp_path: Path) -> None:
    old, new = Authority(), Authority()
    files = old.issue(tmp_path / "tls")
    with controller(RENEWING, redis_url, tmp_path, FLOWFLEET_TLS_DIR=str(files)) as (process, address):
        old_ca = tmp_path / "old.crt"
        old_ca.write_bytes(old.pem)
        with Client(f"https://{address}", ca=old_ca) as client:
            client.version()
        new.issue(files)
        deadline = time.monotonic() + 20
        while True:
            try:
                with Client(f"https://{address}", ca=files / "ca.crt") as client:
                    client.version()
                break
            except ApiError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert stop(process)[0] == 0


def test_certificates_that_cannot_work_are_told_at_the_start(redis_url: str, tmp_path: Path) -> None:
    files = Authority().issue(tmp_path / "tls", expired=True)
    env = {"FLOWFLEET_REDIS_URL": redis_url, "FLOWFLEET_TLS_DIR": str(files), "PATH": ""}
    argv = [sys.executable, "-m", "services.controller", "--port", "0"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "tls.crt cannot be used: certificate has expired" in done.stderr
    assert "Traceback" not in done.stderr
