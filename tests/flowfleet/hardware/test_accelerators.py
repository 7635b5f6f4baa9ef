"""Which accelerators a process would see, by what the driver counts and the variables that are set."""

import os
from pathlib import Path

import pytest

from flowfleet.hardware.accelerators import VISIBLE, missing_devices, show_only, visible_devices


@pytest.mark.parametrize(
    ("env", "counts", "devices"),
    [
        ({}, {"cuda": 0, "npu": 0}, ""),
        ({}, {"cuda": 3, "npu": 0}, "0 1 2"),
        ({}, {"cuda": 0, "npu": 2}, "0 1"),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, {"cuda": 4}, "2 0"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8a1c, GPU-77f0"}, {"cuda": 4}, "GPU-8a1c GPU-77f0"),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"cuda": 4}, ""),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, {"cuda": 4}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "1,4,2"}, {"cuda": 4}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"cuda": 0}, ""),
        ({"ASCEND_RT_VISIBLE_DEVICES": "5"}, {"npu": 8}, "5"),
        ({"FLOWFLEET_DEVICE": "cpu"}, {"cuda": 4}, ""),
        ({"FLOWFLEET_DEVICE": "npu"}, {"cuda": 4, "npu": 1}, "0"),
    ],
)
def test_visible_devices(env: dict[str, str], counts: dict[str, int], devices: str) -> None:
    assert visible_devices(env, lambda kind: counts.get(kind, 0)) == tuple(devices.split())


@pytest.mark.parametrize(
    ("wanted", "devices", "cuda", "problem"),
    [
        ("auto", "", 0, ""),
        ("auto", "0 1", 2, ""),
        ("auto", "GPU-8a1c", 1, ""),
        ("cuda", "", 1, ""),
        ("cpu", "", 4, ""),
        ("auto", "1 2 3", 2, "accelerator 2, 3 is asked for, but this machine has accelerators 0 to 1"),
        ("auto", "1", 1, "accelerator 1 is asked for, but this machine has accelerator 0 alone"),
        ("auto", "0", 0, "accelerator 0 is asked for, but this machine has no accelerator"),
        ("auto", "GPU-8a1c", 0, "accelerator GPU-8a1c is asked for, but this machine has no accelerator"),
        ("cuda", "", 0, "FLOWFLEET_DEVICE is cuda, but this machine has no such accelerator"),
        ("cpu", "0", 4, "FLOWFLEET_DEVICE is cpu, but accelerators 0 are asked for"),
        ("gpu", "", 4, "FLOWFLEET_DEVICE is 'gpu': use auto, cpu, cuda or npu"),
    ],
)
def test_missing_devices(wanted: str, devices: str, cuda: int, problem: str) -> None:
    counts = {"cuda": cuda, "npu": 0}
    assert missing_devices(devices.split(), {"FLOWFLEET_DEVICE": wanted}, counts.__getitem__) == problem


def test_a_process_shown_some_sees_just_them() -> None:
    shown = show_only(["3", "1"])
    assert visible_devices(shown, lambda kind: 4 if kind == "cuda" else 0) == ("3", "1")
    assert visible_devices(shown, lambda kind: 4 if kind == "npu" else 0) == ("3", "1")
    assert show_only([]) == {}


@pytest.mark.parametrize(
    ("script", "devices"),
    [
        ("printf 'GPU 0: NVIDIA X (UUID: GPU-a)\\nGPU 1: NVIDIA X (UUID: GPU-b)\\n'", ("0", "1")),
        ("printf 'GPU 0: NVIDIA X (UUID: GPU-a)\\n'; exit 9", ()),
    ],
)
def test_the_driver_is_asked(
    script: str, devices: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    for name in (*VISIBLE.values(), "FLOWFLEET_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert visible_devices({"FLOWFLEET_DEVICE": "cuda"}) == devices
