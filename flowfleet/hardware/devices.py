"""The one place that names an accelerator. Everything else asks here and gets "cpu", "cuda" or "npu" by value.

`FLOWFLEET_DEVICE` forces a kind; otherwise the first accelerator that torch can use is taken, else the CPU.
"""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flowfleet.hardware import drivers
from flowfleet.hardware.cards import card_of

log = logging.getLogger(__name__)

_HAS_TRITON = find_spec("triton") is not None
"""Looked for once: torch.compile cannot trace the search, and breaks the graph of a block there."""

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_NCCL_LIVES_ON = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # CleanUpOnly: abort the communicator, not the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no thread that ends the process when an abort takes long
}
"""Read by ProcessGroupNCCL when it is made. The group of a trainer's own ranks keeps torch's defaults."""

CONTEXT_BYTES = 2**29 + 2**27
"""Memory that a process's context takes of an accelerator, about."""
_LIMIT_BYTES = int(float(os.environ.get("FLOWFLEET_DEVICE_GIB") or 2**20) * 2**30)
"""Memory of an accelerator that each process may take, its context included."""


def pick_device(local_rank: int = 0) -> torch.device:
    """The device of this rank on its host. Raises ValueError when `FLOWFLEET_DEVICE` names one that is not there, and
    when the driver is too old for this torch."""
    kind = pick_kind()
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank)
    bind(device)
    return device


def pick_kind() -> str:
    """Returns the kind of `pick_device`'s device, or raises as it does. Binds to none, and so takes no memory of it."""
    wanted = os.environ.get("FLOWFLEET_DEVICE", "auto")
    if wanted not in ("auto", *_BACKENDS):
        raise ValueError(f"FLOWFLEET_DEVICE={wanted!r}: use auto, {', '.join(_BACKENDS)}")
    if wanted in ("auto", "cuda") and (reason := drivers.too_old(torch.version.cuda)):
        raise ValueError(reason)
    for kind in ("cuda", "npu"):
        module = _module(kind)
        if wanted in ("auto", kind) and module is not None and module.is_available():
            return kind
    if wanted not in ("auto", "cpu"):
        raise ValueError(f"FLOWFLEET_DEVICE={wanted}: torch {torch.__version__} finds no such device here")
    return "cpu"


def bind(device: torch.device) -> None:
    """Makes it the calling thread's current device. Every thread that computes needs it."""
    if is_accelerator(device):
        _of(device).set_device(device)
        if (total := int(_of(device).get_device_properties(device).total_memory)) > _LIMIT_BYTES:
            _of(device).set_per_process_memory_fraction((_LIMIT_BYTES - CONTEXT_BYTES) / total, device)


def bound(device: torch.device) -> AbstractContextManager[None]:
    """Inside, it is the calling thread's current device, on which kernels are launched."""
    context: AbstractContextManager[None] = _of(device).device(device) if is_accelerator(device) else nullcontext()
    return context


def backend(device: torch.device) -> str:
    """The torch.distributed backend of a device: "gloo", "nccl" or "hccl"."""
    return _BACKENDS[device.type]


def is_accelerator(device: torch.device) -> bool:
    return device.type != "cpu"


def count(device: torch.device) -> int:
    """How many accelerators of its kind this process sees."""
    return int(_of(device).device_count()) if is_accelerator(device) else 0


def synchronize(device: torch.device) -> None:
    """Waits for everything queued on the device, so that wall-clock times mean what they say."""
    if is_accelerator(device):
        _of(device).synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held by tensors on an accelerator since start; 0 on the CPU, where torch does not count."""
    return int(_of(device).max_memory_allocated(device)) if is_accelerator(device) else 0


def memory_bytes(device: torch.device) -> int | None:
    """Memory of an accelerator as a whole, or as much of it as `FLOWFLEET_DEVICE_GIB` allows; None on the CPU."""
    if not is_accelerator(device):
        return None
    return min(int(_of(device).get_device_properties(device).total_memory), _LIMIT_BYTES)


def free_bytes(device: torch.device) -> int | None:
    """Memory of an accelerator that this process can still take, what torch holds without need included; None on the
    CPU."""
    if not is_accelerator(device):
        return None
    module = _of(device)
    held, allowed = int(module.memory_reserved(device)), int(module.mem_get_info(device)[0])
    return min(allowed + held, _LIMIT_BYTES - CONTEXT_BYTES) - int(module.memory_allocated(device))


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s that the maker states for dense products of bf16 (Ascend: fp16) matrices; None for a device that is not in
    `CARDS`."""
    if not is_accelerator(device):
        return None
    card = card_of(str(_of(device).get_device_name(device)))
    return None if card is None else card.peak_flops


def name_of(device: torch.device) -> str:
    """The device, with its maker's name of an accelerator."""
    return f"{device} ({_of(device).get_device_name(device)})" if is_accelerator(device) else str(device)


def has_fused_optimizer(device: torch.device) -> bool:
    """Returns True if torch's AdamW has a fused kernel on the device."""
    return device.type in ("cpu", "cuda")


def has_float64(device: torch.device) -> bool:
    """Returns True if torch computes in float64 on the device."""
    return device.type in ("cpu", "cuda")


def has_fp8(device: torch.device) -> bool:
    """Returns True if torch multiplies float8 matrices with row-wise scales on the device, in hardware."""
    return device.type == "cuda" and torch.version.hip is None and _of(device).get_device_capability(device) >= (8, 9)


def has_grouped_fp8(device: torch.device) -> bool:
    """Returns True if torch multiplies rows of many experts in one float8 product on the device."""
    return has_fp8(device) and _of(device).get_device_capability(device) >= (9, 0)


def has_graphs(device: torch.device) -> bool:
    """Returns True if sequences of kernels can be captured and replayed on the device; `FLOWFLEET_GRAPHS=off` has all
    launched."""
    return device.type == "cuda" and torch.version.hip is None and os.environ.get("FLOWFLEET_GRAPHS") != "off"


def has_triton(device: torch.device) -> bool:
    """Returns True if Triton's kernels run on the device. Triton comes with torch for CUDA on Linux."""
    return device.type == "cuda" and _HAS_TRITON


def identity(device: torch.device) -> str:
    """Names the physical accelerator, the same from every process; empty for the CPU."""
    if not is_accelerator(device):
        return ""
    uuid = getattr(_of(device).get_device_properties(device), "uuid", None)
    if uuid is not None:
        return str(uuid)
    index = _of(device).current_device() if device.index is None else device.index
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",")
    physical = visible[index] if index < len(visible) and visible[index] else str(index)
    return f"{socket.gethostname()}/{device.type}/{physical}"


def byte_buffer(size_bytes: int, device: torch.device) -> torch.Tensor:
    """(size_bytes,) uint8, zeros. In host memory it is pinned where there is an accelerator to copy from or to, and the
    host allows it."""
    pinned = not is_accelerator(device) and any(
        module is not None and module.is_available() for module in map(_module, ("cuda", "npu"))
    )
    try:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    except RuntimeError as error:
        if not pinned:
            raise
        log.warning("%d bytes of pinned memory refused, copies to the device will be slower: %s", size_bytes, error)
        return torch.zeros(size_bytes, dtype=torch.uint8)


@contextmanager
def memory_history(device: torch.device, snapshot: Path) -> Iterator[None]:
    """Records allocations inside, and writes torch's snapshot of them; on CUDA alone."""
    if device.type != "cuda":
        yield
        return
    memory: Any = torch.cuda.memory
    memory._record_memory_history(max_entries=100_000)
    try:
        yield
        memory._dump_snapshot(str(snapshot))
    finally:
        memory._record_memory_history(enabled=None)


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Generator states of this rank: uint8 tensors on the CPU, by name."""
    states = {"cpu": torch.get_rng_state()}
    if is_accelerator(device):
        states["device"] = _of(device).get_rng_state(device)
    return states


def set_rng_state(device: torch.device, states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if is_accelerator(device) and "device" in states:
        _of(device).set_rng_state(states["device"], device)


def tell_start() -> None:
    """Logs this machine's driver and RDMA devices, once a host, before NCCL is used. Raises ValueError where RDMA was
    given and does not work."""
    if torch.version.cuda:
        drivers.nccl_log()
    if (line := drivers.found(torch.version.cuda)) and os.environ.get("LOCAL_RANK", "0") == "0":
        log.info("%s", line)


def tell_transport(backend: str) -> None:
    """Logs the transport of NCCL's newest communicator, if it is another than before."""
    if backend == "nccl":
        drivers.nccl_log().tell()


def new_process_group(name: str, store: Any, rank: int, size: int, timeout: Any, *, loopback: bool) -> Any:
    """A ProcessGroup object of its own, outside torch's registry of groups, so that it can come and go at run time.

    A member that dies costs the group, never this process. `loopback` keeps Gloo's sockets on 127.0.0.1. Raises
    RuntimeError when a member does not come within `timeout`; NCCL and HCCL meet in the first collective only. HCCL
    is written after NCCL's way and torch_npu's sources, and has not been run.
    """
    from torch._C import _distributed_c10d as c10d

    if name == "gloo":
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        device = {"hostname": "127.0.0.1"} if loopback else {}
        options._devices = [c10d.ProcessGroupGloo.create_device(**device)]
        return c10d.ProcessGroupGloo(store, rank, size, options)
    if name == "nccl":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = 2 * timeout  # the caller's own deadline comes first
        with _environment(_NCCL_LIVES_ON):
            return c10d.ProcessGroupNCCL(store, rank, size, options)
    if name == "hccl":
        import torch_npu  # type: ignore[import-not-found]

        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options._timeout = 2 * timeout
        with _environment({"HCCL_ASYNC_ERROR_HANDLING": "0"}):
            return torch_npu._C._distributed_c10d.ProcessGroupHCCL(store, rank, size, options)
    raise ValueError(f"backend {name!r}: use gloo, nccl or hccl")


def abort_process_group(name: str, group: Any) -> None:
    """Ends what runs in a group of `new_process_group`. Can block while the device gives it up; Gloo does nothing."""
    if name == "hccl":
        group.abort_hccl_comm("the transfer group was left")
    else:
        group.abort()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def _of(device: torch.device) -> Any:
    module = _module(device.type)
    assert module is not None, f"{device} was chosen without its torch module"
    return module


def _module(kind: str) -> ModuleType | None:
    return getattr(torch, kind, None)
