"""Known vulnerabilities of the Python packages that are installed: `make audit`, in .venv.

    python -m deploy.audit [flags of pip-audit, such as -s osv]

Exit codes: 0 without any that is not allowed; 1 for a vulnerability, or an entry of audit-allowed.toml that is wrong or
past its day; 3 where the data cannot be had, so that nothing is known.

Package mirrors answer that they know nothing of a package, which pip-audit reports as "no known vulnerabilities". So a
version that everybody knows to be vulnerable is asked for first.
"""

import datetime
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError

ALLOWED = Path(__file__).with_name("audit-allowed.toml")
KNOWN = {"requests": "2.19.0"}
"""Vulnerable since 2018."""
TIMEOUT_S = 900.0
NO_DATA = 3


class Allowed(BaseModel):
    """A vulnerability that may stay for a while."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    package: str
    reason: str = Field(min_length=20)
    until: datetime.date


class NoData(Exception):
    """The vulnerability service gave no data; the message is pip-audit's."""


def installed() -> dict[str, str]:
    """Package → public version (without "+cpu") of this environment, but for Flowfleet itself."""
    found = {canonicalize_name(one.metadata["Name"]): Version(one.version).public for one in metadata.distributions()}
    return {str(name): version for name, version in sorted(found.items()) if name != "flowfleet"}


def ask(versions: Mapping[str, str], flags: Sequence[str]) -> list[dict[str, Any]]:
    """Asks pip-audit about the packages. Each entry has a package's `vulns`, or a `skip_reason`. Raises NoData."""
    with tempfile.TemporaryDirectory() as place:
        pins = Path(place, "pins.txt")
        pins.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
        command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--requirement", str(pins)]
        command += ["--format", "json", "--progress-spinner", "off", *flags]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise NoData(f"pip-audit has not ended after {TIMEOUT_S:g} s") from None
    if not done.stdout.startswith("{"):
        if done.returncode == 2:
            raise ValueError(f"pip-audit refuses its flags: {_last_line(done.stderr)}")
        raise NoData(_last_line(done.stderr))
    found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    return found


def allowed(path: Path, today: datetime.date) -> dict[str, Allowed]:
    """Vulnerability → why it may stay. Raises ValueError for an entry that is wrong or past its day."""
    entries = {}
    for number, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
        try:
            entries[number] = Allowed.model_validate(entry)
        except ValidationError as error:
            raise ValueError(f"{path.name}: [{number}] needs package, reason and until: {error}") from None
        if entries[number].until < today:
            raise ValueError(f"{path.name}: [{number}] was allowed until {entries[number].until}: update the package")
    return entries


def judge(found: Iterable[Mapping[str, Any]], may_stay: Mapping[str, Allowed]) -> Iterator[str]:
    """A line for each vulnerability that may not stay."""
    for package in found:
        for vulnerability in package.get("vulns", ()):
            numbers = {vulnerability["id"], *vulnerability.get("aliases", ())}
            if any(number in may_stay and may_stay[number].package == package["name"] for number in numbers):
                continue
            fixed = ", ".join(vulnerability["fix_versions"]) or "no version"
            yield f"{package['name']} {package['version']}: {', '.join(sorted(numbers))}, fixed in {fixed}"


def main(flags: Sequence[str], path: Path = ALLOWED) -> int:
    try:
        may_stay = allowed(path, datetime.datetime.now(datetime.UTC).date())
        if not any(package.get("vulns") for package in ask(KNOWN, [*flags, "--timeout", "10"])):
            raise NoData("it knows no vulnerability of a version that has some")
        found = ask(installed(), flags)
    except NoData as error:
        print(f"audit: skipped, the vulnerability service has no data for this machine: {error}")
        return NO_DATA
    except ValueError as error:
        print(f"audit: error: {error}", file=sys.stderr)
        return 1
    unknown = [package["name"] for package in found if "skip_reason" in package]
    bad = list(judge(found, may_stay))
    print(*(f"audit: {line}" for line in bad), sep="\n", end="\n" if bad else "")
    also = f", the service does not know {', '.join(unknown)}" if unknown else ""
    print(f"audit: {len(found) - len(unknown)} packages looked up, {len(bad)} vulnerabilities not allowed{also}")
    return 1 if bad else 0


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
