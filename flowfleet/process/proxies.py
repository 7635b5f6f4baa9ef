"""No proxy stands between a process and its own machine, whatever the proxy variables of its environment say.

Our own clients of loopback ignore these variables. Libraries read them by themselves (stores, trackers, exporters of
traces), so a stack and its commands run with loopback among the exceptions.
"""

from collections.abc import Mapping
from typing import Final

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_NAMES: Final = ("no_proxy", "NO_PROXY")


def is_proxy_variable(name: str) -> bool:
    return name.lower().endswith("_proxy")


def direct_to_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to add to an environment; none where it names no proxy."""
    listed = environment.get(_NAMES[0]) or environment.get(_NAMES[1]) or ""
    proxies = [name for name, value in environment.items() if value and is_proxy_variable(name) and name not in _NAMES]
    if not proxies or listed.strip() == "*":
        return {}
    hosts = dict.fromkeys([*filter(None, map(str.strip, listed.split(","))), *LOOPBACK])
    return dict.fromkeys(_NAMES, ",".join(hosts))
