"""Checks of a controller: is it reachable, does it take our key and speak our version, has it what jobs need?"""

import importlib.metadata
import socket
from collections.abc import Iterator
from itertools import islice
from typing import Final

from flowfleet.api.fleet import Fleet
from flowfleet.api.problems import ApiError
from flowfleet.cli.doctor.finding import Finding, note, ok, problem
from flowfleet.client.client import Client

CONNECT_S: Final = 2.0


def look_at_controller(client: Client, is_named: bool) -> Iterator[Finding]:
    """Findings about the controller. `is_named`: the user names it, so it must be there."""
    try:
        version = str(client.version()["version"])
    except ApiError as error:
        if error.status == 0 and not is_named:
            yield note("controller", f"none at {client.url}", "start one with `flowfleet up`, or name one by --url")
        else:
            yield problem("controller", str(error), "correct --url, FLOWFLEET_URL or --ca, or start the controller")
        return
    yield _version(client.url, version)
    try:
        list(islice(client.jobs(), 1))
        fleet = client.fleet()
    except ApiError as error:
        yield problem("key", str(error), "set FLOWFLEET_API_KEY to the controller's key")
        return
    yield ok("key", "the controller accepts it" if client.has_key else "none is needed")
    yield from _fleet(fleet, is_here=client.on_this_machine)


def _version(url: str, version: str) -> Finding:
    installed = importlib.metadata.version("flowfleet")
    versions = f"{url} runs {version}, this is {installed}"
    if version.split(".")[:2] == installed.split(".")[:2]:
        return ok("controller", versions)
    return note("controller", versions, f"use version {version} here too: others may differ in settings")


def _fleet(fleet: Fleet, *, is_here: bool) -> Iterator[Finding]:
    """`is_here`: this machine reaches the addresses that the controller knows."""
    if fleet.replicas:
        yield ok("rollouts", f"{len(fleet.replicas)} replicas")
    else:
        yield note("rollouts", "no replica", "jobs wait until one is there: `flowfleet fleet` shows pools")
    for name, addresses in sorted(fleet.rewards.items()):
        away = [address for address in addresses if is_here and not _listens(address)]
        if away:
            yield problem(f"reward {name}", f"{', '.join(away)} cannot be reached", "start it, or correct its address")
        elif addresses:
            yield ok(f"reward {name}", ", ".join(addresses))
        else:
            yield problem(f"reward {name}", "no replica is ready", "see its log, or `flowfleet fleet`")
    for shortage in fleet.shortages:
        yield problem(f"{shortage.component} {shortage.name}", shortage.reason, "see docs/operations.md")


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True
