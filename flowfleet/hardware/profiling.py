"""Largest costs and a trace of a piece of work, as PyTorch's profiler sees it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from flowfleet.api.profiles import Cost
from flowfleet.hardware import devices

LARGEST = 10
"""Costs in a table."""


@contextmanager
def profiled(device: torch.device) -> Iterator[profile]:
    """Profiles what runs inside, on this thread and the device."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as seen:
        yield seen
        devices.synchronize(device)


def costs_of(seen: profile, device: torch.device) -> list[Cost]:
    """The operators, or on an accelerator the kernels, that took the most time by themselves."""
    on_device = devices.is_accelerator(device)
    rows = [
        Cost(
            name=row.key,
            calls=row.count,
            seconds=(row.self_device_time_total if on_device else row.self_cpu_time_total) / 1e6,
        )
        for row in seen.key_averages()
        if not on_device or row.device_type.name != "CPU"
    ]
    return sorted(rows, key=lambda cost: -cost.seconds)[:LARGEST]


def trace_of(seen: profile) -> bytes:
    """The trace for Perfetto, compressed by gzip."""
    with TemporaryDirectory(prefix="profile-") as place:
        file = Path(place, "trace.json.gz")
        seen.export_chrome_trace(str(file))
        return file.read_bytes()
