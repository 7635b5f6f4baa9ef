"""`make audit`: pip-audit against a vulnerability service of the test's own, and the list of what is allowed."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy import audit

CI = Path(__file__).parents[2] / ".ci/run"
TODAY = datetime.date(2026, 11, 23)
ENTRY = '[CVE-1]\npackage = "jinja2"\nreason = "Templates of strangers are never rendered."\nuntil = {until}\n'
NUMBERS: dict[str, str] = {"requests": "PYSEC-2018-28", "jinja2": "GHSA-1"}
INSTALLED = {"jinja2": "3.1.2", "grpcio": "1.85.1"}


class Service(BaseHTTPRequestHandler):
    """Speaks OSV's protocol and knows the vulnerabilities of `known`."""

    known: frozenset[str]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["package"]
        name = asked["name"]
        events = [{"introduced": "0"}, {"fixed": "99.1"}]
        affected = [{"package": asked, "ranges": [{"type": "ECOSYSTEM", "events": events}]}]
        one = {"id": NUMBERS.get(name), "aliases": ["CVE-1"], "summary": "bad", "affected": affected}
        body = json.dumps({"vulns": [one]} if name in self.known else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Flags of pip-audit that name the service."""
    monkeypatch.setattr(audit, "installed", lambda: INSTALLED)
    kept = type("Kept", (Service,), {"known": frozenset(request.param)})
    with ThreadingHTTPServer(("127.0.0.1", 0), kept) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cache = ["--cache-dir", str(tmp_path / "cache")]
        yield ["-s", "osv", "--osv-url", f"http://127.0.0.1:{server.server_port}", *cache]
        server.shutdown()


@pytest.mark.parametrize("service", [{"requests", "jinja2"}], indirect=True)
def test_a_vulnerability_that_is_not_allowed_fails(
    service: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (listed := tmp_path / "allowed.toml").write_text("")
    assert audit.main(service, listed) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "audit: jinja2 3.1.2: CVE-1, GHSA-1, fixed in 99.1"
    assert said[1] == "audit: 2 packages looked up, 1 vulnerabilities not allowed"


@pytest.mark.parametrize("service", [{"jinja2"}], indirect=True)
def test_a_service_that_knows_nothing_is_not_taken_for_a_clean_bill(
    service: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(service) == audit.NO_DATA
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("audit: skipped, ")


@pytest.mark.long
def test_a_service_that_cannot_be_reached_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(["-s", "osv", "--osv-url", "http://127.0.0.1:9"]) == audit.NO_DATA
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("audit: skipped, ")
    assert "127.0.0.1" in said


@pytest.mark.long
def test_wrong_flags_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(["--no-such-flag"]) == 1
    assert "no-such-flag" in capsys.readouterr().err


def test_ci_lets_missing_data_pass_and_nothing_else(tmp_path: Path) -> None:
    """The line of .ci/run, with an audit that ends with this code."""
    (line,) = [line for line in CI.read_text().splitlines() if "deploy.audit" in line]
    (python := tmp_path / ".venv/bin/python").parent.mkdir(parents=True)
    for code, status in ((0, 0), (audit.NO_DATA, 0), (1, 1), (2, 2)):
        python.write_text(f"#!/bin/sh\nexit {code}\n")
        python.chmod(0o755)
        script = f'set -e; status=0; worst() {{ [ "$1" -le "$status" ] || status=$1; }}\n{line}\nexit $status'
        assert subprocess.run(["bash", "-c", script], cwd=tmp_path).returncode == status


def test_all_that_is_installed_is_looked_up() -> None:
    versions = audit.installed()
    assert {"grpcio", "torch", "pip-audit"} <= versions.keys()
    assert "flowfleet" not in versions
    assert not [version for version in versions.values() if "+" in version], "a service knows no local version"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ENTRY.format(until="2026-11-22"), r"\[CVE-1\] was allowed until 2026-11-22: update the package"),
        ('[CVE-1]\npackage = "jinja2"\nuntil = 2027-01-01\n', r"\[CVE-1\] needs package, reason and until"),
        (ENTRY.format(until="2027-01-01") + "why = 1\n", r"\[CVE-1\] needs package, reason and until"),
    ],
)
def test_an_entry_needs_a_reason_and_ends(text: str, message: str, tmp_path: Path) -> None:
    (listed := tmp_path / "allowed.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        audit.allowed(listed, TODAY)


def test_an_entry_is_for_its_package_alone(tmp_path: Path) -> None:
    (listed := tmp_path / "allowed.toml").write_text(ENTRY.format(until="2026-11-23"))
    may_stay = audit.allowed(listed, TODAY)
    vulnerability: dict[str, Any] = {"id": "GHSA-1", "aliases": ["CVE-1"], "fix_versions": []}
    found = [{"name": name, "version": "1", "vulns": [vulnerability]} for name in ("jinja2", "other")]
    assert list(audit.judge(found, may_stay)) == ["other 1: CVE-1, GHSA-1, fixed in no version"]


def test_the_list_of_the_repository_is_in_order() -> None:
    audit.allowed(audit.ALLOWED, datetime.datetime.now(datetime.UTC).date())


def test_ci_runs_actions_by_their_commits() -> None:
    """A tag can be moved to other code."""
    used = re.findall(r"uses: *(.+)", (CI.parents[1] / ".github/workflows/ci.yml").read_text())
    assert used
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v[\d.]+", one) for one in used)
