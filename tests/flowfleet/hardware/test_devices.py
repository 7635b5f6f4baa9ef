"""Which device is taken; the accelerators themselves are not here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowfleet.hardware import devices


def test_the_cpu_is_taken_where_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFLEET_DEVICE", "cpu")
    device = devices.pick_device()
    assert device == torch.device("cpu")
    assert devices.backend(device) == "gloo"
    assert not devices.is_accelerator(device)
    assert devices.peak_memory_bytes(device) == 0


def test_a_device_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFLEET_DEVICE", "gpu")
    with pytest.raises(ValueError, match="use auto, cpu, cuda, npu"):
        devices.pick_device()
    monkeypatch.setenv("FLOWFLEET_DEVICE", "npu")
    with pytest.raises(ValueError, match="finds no such device"):
        devices.pick_device()


def test_compiled_code_may_ask_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks do, and a break in their graph would run them in eager: Python 3.12's search for a module is one."""

    def search(name: str) -> None:
        raise AssertionError(f"looks for {name} while it is traced")

    monkeypatch.setattr(devices, "find_spec", search)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + devices.has_triton(torch.device("cuda"))

    torch._dynamo.reset()
    assert torch.compile(forward, backend="eager", fullgraph=True)(torch.zeros(1)) in (0, 1)


def test_generator_states_come_back() -> None:
    device = torch.device("cpu")
    before = devices.rng_state(device)
    drawn = torch.randn(3)
    devices.set_rng_state(device, before)
    assert torch.equal(torch.randn(3), drawn)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Ascend910B3", 376e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H20", 148e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_a_peak_is_known_by_the_devices_name(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    assert devices.peak_flops(torch.device("cuda", 0)) == peak
    assert devices.peak_flops(torch.device("cpu")) is None
    assert devices.memory_bytes(torch.device("cpu")) is None


def test_a_host_that_refuses_pinned_memory_gives_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return torch.ones(*args, **kwargs)

    monkeypatch.setattr(devices, "_module", lambda _: SimpleNamespace(is_available=lambda: True))
    monkeypatch.setattr(torch, "zeros", refused)
    assert devices.byte_buffer(3, torch.device("cpu")).tolist() == [1, 1, 1]
    assert "3 bytes of pinned memory refused" in caplog.text
