"""The NVIDIA driver, RDMA devices and NCCL's transport of a process. Free of torch.

too_old(cuda)     why the driver cannot run a build of torch for that CUDA
found(cuda)       the line that a process logs at start; raises where RDMA was given and does not work
NcclLog           what NCCL chose for the communicators of this process, read from NCCL's own log

No call of NCCL names its transport, so NCCL logs into a file. Where NCCL_DEBUG is set already, its log stays the user's
and the transport is not read.
"""

import atexit
import ctypes
import functools
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

RDMA: Final = "FLOWFLEET_RDMA"
"""Environment: the RDMA resource that the container was given, such as rdma/hca. The chart sets it."""
OLDEST_DRIVER: Final = {12: "525.60.13", 13: "580.65.06"}
"""Major version of CUDA → the first Linux driver that runs its programs, by NVIDIA's release notes."""
_NAME_BYTES: Final = 96
_NETWORK: Final = re.compile(r"Using network (\S+)")
_VIA: Final = re.compile(r" via ([A-Z]\S*)")
_NUMBERS: Final = re.compile(r"/\d+[(\[]?\d*[)\]]?")

Load = Callable[[str], Any]

log = logging.getLogger(__name__)


def too_old(cuda: str | None, load: Load = ctypes.CDLL) -> str:
    """Says why this machine's driver cannot run a build of torch for that CUDA ("13.0"); empty if it can, if there is
    none, or if the build is not for CUDA."""
    needed = int((cuda or "0").partition(".")[0])
    offered = _cuda_of_driver(load)
    if not needed or offered is None or offered[0] >= needed:
        return ""
    return (
        f"the NVIDIA driver {_driver_version(load)} runs CUDA {offered[0]}.{offered[1]}, but this torch is for "
        f"CUDA {cuda}: install driver {OLDEST_DRIVER.get(needed, 'of that CUDA')} or newer on the node, take a torch "
        f"for CUDA {offered[0]}, or set FLOWFLEET_DEVICE=cpu"
    )


def found(cuda: str | None, env: Mapping[str, str] = os.environ, load: Load = ctypes.CDLL) -> str:
    """Describes driver and RDMA devices; empty for a build without CUDA. Raises ValueError where `RDMA` names a
    resource and verbs find no device."""
    given = env.get(RDMA)
    if not cuda and not given:
        return ""
    offered = _cuda_of_driver(load)
    if offered is None:
        driver = "no NVIDIA driver"
    else:
        driver = f"NVIDIA driver {_driver_version(load)} (CUDA {offered[0]}.{offered[1]})"
    try:
        devices, missing = _rdma_devices(load), "verbs find no device"
    except OSError as error:
        devices, missing = [], f"verbs cannot be loaded ({error})"
    if given and not devices:
        raise ValueError(
            f"this container was given {given}, but {missing}: see that its device plugin mounts /dev/infiniband and "
            "that the image has libibverbs1 and ibverbs-providers, or take the resource away"
        )
    return f"{driver}; torch for CUDA {cuda or 'none'}; RDMA: {', '.join(devices) or missing}"


class NcclLog:
    """Makes NCCL of this process write to a file, unless NCCL_DEBUG is set."""

    def __init__(self, env: Any = os.environ, folder: str | None = None) -> None:
        self._given = env.get(RDMA, "")
        self._path: Path | None = None
        self._read_to, self._said = 0, ""
        if "NCCL_DEBUG" not in env:
            place = os.path.join(folder or tempfile.gettempdir(), "flowfleet-nccl-")
            env |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM", "NCCL_DEBUG_FILE": f"{place}%p.log"}
            self._path = Path(f"{place}{os.getpid()}.log")
            atexit.register(self._path.unlink, missing_ok=True)

    def tell(self) -> None:
        """Logs which transports NCCL took since the last call, unless they are the same as before."""
        if news := self.news():
            log.log(logging.WARNING if "is not used" in news else logging.INFO, "%s", news)

    def news(self) -> str:
        """Returns the line of `tell`; empty if there is nothing new. It says so where RDMA was given and NCCL took
        sockets."""
        lines = self._lines()
        via = sorted({_NUMBERS.sub("", way) for way in _VIA.findall(lines)})
        network = sorted(set(_NETWORK.findall(lines)))
        said = ", ".join([*via, *(f"network {name}" for name in network)])
        if said in ("", self._said):
            return ""
        self._said = said
        unused = self._given and any("Socket" in name for name in (*via, *network))
        return f"NCCL transport: {said}{f'; {self._given} is not used: see NCCL_IB_HCA' if unused else ''}"

    def _lines(self) -> str:
        """Reads what is new, and gives its room on the disk back: NCCL writes on behind the hole."""
        if self._path is None:
            return ""
        with suppress(FileNotFoundError), self._path.open("rb+") as file:
            file.seek(self._read_to)
            lines = file.read()
            self._read_to += len(lines)
            file.truncate(0)
            return lines.decode(errors="replace")
        return ""


@functools.cache
def nccl_log() -> NcclLog:
    """The log of this process. The first call comes before NCCL's first communicator."""
    return NcclLog()


def _cuda_of_driver(load: Load) -> tuple[int, int] | None:
    """(major, minor) of the newest CUDA that the driver runs, a CUDA compatibility package considered."""
    with suppress(OSError):
        version = ctypes.c_int()
        if load("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000, version.value % 1000 // 10
    return None


def _driver_version(load: Load) -> str:
    with suppress(OSError):
        nvml, text = load("libnvidia-ml.so.1"), ctypes.create_string_buffer(_NAME_BYTES)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, _NAME_BYTES) == 0:
            return text.value.decode()
    return "of unknown version"


def _rdma_devices(load: Load) -> list[str]:
    """Names of the devices that verbs open. Raises OSError where the library does not load."""
    verbs, count = load("libibverbs.so.1"), ctypes.c_int()
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    devices = verbs.ibv_get_device_list(ctypes.byref(count))
    return [verbs.ibv_get_device_name(ctypes.c_void_p(devices[at])).decode() for at in range(count.value)]
