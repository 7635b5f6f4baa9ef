"""Confines a process before it reads what strangers name: it gives up other files, programs and machines.

The reader (process.py) confines itself once it has loaded its code. Three layers, each of which holds alone
against what it is there for:

- another user id, where the controller is root: files that only root may read, such as the stack's password file;
- Landlock, where the kernel has it: no file beyond the interpreter's own and the system's names and certificates can
  be opened, and no process outside of the reader can be traced, which is what /proc/PID/environ and mem ask for;
- audit hooks of Python, everywhere: `open`, `connect` and new processes are refused before they reach the kernel.

The controller adds its own part: it cannot be dumped, so that no process of its user reads its memory or environment.
"""

import contextlib
import ctypes
import ipaddress
import os
import site
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""landlock(7); the numbers are the same on all architectures."""
_ALL_OF_ABI_1 = (1 << 13) - 1
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_PATH_BENEATH = 1
_NOBODY = 65_534
_SYSTEM = (
    "/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/usr/share/ca-certificates", "/etc/resolv.conf", "/etc/hosts",
    "/etc/host.conf", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/services", "/etc/mime.types", "/etc/localtime",
    "/run/systemd/resolve", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo",
    "/dev/null", "/dev/urandom",
)  # fmt: skip
_STARTS = (
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "os.system",
    "subprocess.Popen",
    "pty.spawn",
)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_NOT_PUBLIC: tuple[Network, ...] = tuple(
    map(
        ipaddress.ip_network,
        ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "::/96", "::ffff:0:0:0/96", "fec0::/10"),
    )
)
"""Addresses of a cloud's hosts (Azure, Oracle), of protocols, IPv4 inside IPv6, and site-local ones. `ipaddress` takes
them for public, at least in Python 3.11."""


def hide_memory() -> None:
    """Makes this process one that cannot be dumped: others of its user read neither its memory nor its environment.
    Does nothing beyond Linux."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def confine(networks: Sequence[Network]) -> None:
    """Confines this process for good. `networks` may be connected to although they are not public."""
    own = _own_files()
    _become_nobody()
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform.startswith("linux"):
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        _landlock(libc, own)
    sys.addaudithook(_hook(own, tuple(networks)))


def is_public(address: str, networks: Sequence[Network] = ()) -> bool:
    """True if an address belongs to no machine, link, cluster or private network, or to one that is listed."""
    try:
        found = _embedded(ipaddress.ip_address(address.partition("%")[0]))
    except ValueError:
        return False
    if any(found in network for network in networks if network.version == found.version):
        return True
    if any(found in network for network in _NOT_PUBLIC if network.version == found.version):
        return False
    return found.is_global and not found.is_multicast


def _embedded(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IPv4 address that an IPv6 one stands for: mapped, 6to4, Teredo or NAT64."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in ipaddress.ip_network("64:ff9b::/96") or address in ipaddress.ip_network("64:ff9b:1::/48"):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)


def _own_files() -> tuple[str, ...]:
    """Code of this interpreter and what names and certificates need, links resolved."""
    paths = {sys.base_prefix, sys.prefix, str(Path(os.__file__).parent), *site.getsitepackages(), *_SYSTEM}
    here = Path(__file__).resolve().parents[3]
    paths |= {str(here / "flowfleet"), str(here / "services"), *filter(None, (os.environ.get("SSL_CERT_FILE"),))}
    roots = {os.path.realpath(path) for path in paths if os.path.exists(path)}
    return tuple(sorted(roots - {"/", "/usr", "/etc", "/root", "/home"} | ({"/usr/lib"} & roots)))


def _become_nobody() -> None:
    """Root alone can, and must: what only root may read is what a reader must not. Ends the process where it cannot."""
    if os.geteuid() != 0:
        return
    try:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    except OSError as error:
        raise SystemExit(
            f"the reader of data cannot leave root ({error.strerror}): run the controller as another user, or give it "
            "CAP_SETUID and CAP_SETGID"
        ) from None


def _landlock(libc: ctypes.CDLL, paths: Sequence[str]) -> None:
    """Does nothing where the kernel has no Landlock."""
    attributes = struct.pack("=Q", _ALL_OF_ABI_1)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            access = _READ_FILE | (_READ_DIR | _EXECUTE if os.path.isdir(path) else 0)
            libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", access, descriptor), 0)
            os.close(descriptor)
    libc.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _hook(own: tuple[str, ...], networks: tuple[Network, ...]) -> Any:
    beneath = tuple(path + os.sep for path in own)

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path = arguments[0]
            if isinstance(path, str | bytes | os.PathLike):
                found = os.path.realpath(os.fsdecode(path))
                if found not in own and not found.startswith(beneath):
                    raise PermissionError(13, "the reader opens no files", os.fsdecode(path))
        elif event == "socket.connect":
            address = arguments[1]
            if isinstance(address, tuple) and not is_public(str(address[0]), networks):
                raise PermissionError(
                    13, f"{address[0]} is no public address: the controller or `flowfleet up` needs --data-network"
                )
            if not isinstance(address, tuple):
                raise PermissionError(13, "the reader connects to no sockets of this machine")
        elif event in _STARTS or event.startswith("ctypes.dlopen"):
            raise PermissionError(13, f"the reader does not do this: {event}")

    return check
