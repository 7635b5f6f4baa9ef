"""Tells of driver, RDMA and NCCL's transport. Libraries with the same functions stand in for those of the drivers."""

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowfleet.hardware import devices, drivers

INTO_13: dict[str, Any] = {"cuda": 13000, "driver": b"580.159.04"}


def machine(
    cuda: int | None = None, driver: bytes | None = None, rdma: list[bytes] | None = None
) -> Callable[..., Any]:
    """Loads libraries of a machine with this driver and these RDMA devices. None: the library is not there."""

    class Verbs:
        @staticmethod
        def ibv_get_device_list(count: Any) -> Any:
            count._obj.value = len(rdma or ())
            return list(range(1, 1 + len(rdma or ())))

        @staticmethod
        def ibv_get_device_name(device: ctypes.c_void_p) -> bytes:
            assert rdma is not None
            return rdma[(device.value or 0) - 1]

    class Driver:
        @staticmethod
        def cuDriverGetVersion(version: Any) -> int:
            version._obj.value = cuda
            return 0

        @staticmethod
        def nvmlInit_v2() -> int:
            return 0

        @staticmethod
        def nvmlSystemGetDriverVersion(text: Any, _: int) -> int:
            text.value = driver
            return 0

    libraries = {
        "libcuda.so.1": None if cuda is None else Driver,
        "libnvidia-ml.so.1": None if driver is None else Driver,
        "libibverbs.so.1": None if rdma is None else Verbs,
    }

    def load(name: str) -> Any:
        if (library := libraries[name]) is None:
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        return library

    return load


@pytest.mark.parametrize(
    ("offered", "built_for", "sentence"),
    [
        (12090, "13.0", "runs CUDA 12.9, but this torch is for CUDA 13.0: install driver 580.65.06 or newer"),
        (11080, "12.8", "runs CUDA 11.8, but this torch is for CUDA 12.8: install driver 525.60.13 or newer"),
        (13000, "13.2", ""),  # minor versions are compatible
        (14010, "13.0", ""),
        (12090, None, ""),
        (None, "13.0", ""),
    ],
)
def test_a_driver_that_is_too_old_is_named(offered: int | None, built_for: str | None, sentence: str) -> None:
    told = drivers.too_old(built_for, machine(cuda=offered, driver=b"575.57.08"))
    assert sentence in told
    assert told.startswith("the NVIDIA driver 575.57.08") if sentence else not told


def test_a_driver_that_is_too_old_never_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(drivers, "too_old", lambda cuda: f"too old for {cuda}")
    for wanted in ("auto", "cuda"):
        monkeypatch.setenv("FLOWFLEET_DEVICE", wanted)
        with pytest.raises(ValueError, match=r"too old for 13\.0"):
            devices.pick_device()
    monkeypatch.setenv("FLOWFLEET_DEVICE", "cpu")
    assert devices.pick_device().type == "cpu"


def test_the_line_of_the_start_names_driver_and_rdma() -> None:
    load = machine(**INTO_13, rdma=[b"mlx5_0", b"mlx5_1"])
    told = drivers.found("13.0", {drivers.RDMA: "rdma/hca"}, load)
    assert told == "NVIDIA driver 580.159.04 (CUDA 13.0); torch for CUDA 13.0; RDMA: mlx5_0, mlx5_1"
    assert drivers.found("13.0", {}, machine(**INTO_13, rdma=[])).endswith("RDMA: verbs find no device")
    assert drivers.found("13.0", {}, machine()).startswith("no NVIDIA driver; torch for CUDA 13.0; RDMA: verbs cannot")
    assert drivers.found(None, {}, machine()) == ""


@pytest.mark.parametrize(
    ("rdma", "why"), [(None, r"verbs cannot be loaded \(libibverbs\.so\.1: cannot open"), ([], "verbs find no device")]
)
def test_rdma_that_was_given_and_does_not_work_ends_the_process(rdma: list[bytes] | None, why: str) -> None:
    with pytest.raises(ValueError, match=f"was given rdma/hca, but {why}.*ibverbs-providers"):
        drivers.found("13.0", {drivers.RDMA: "rdma/hca"}, machine(**INTO_13, rdma=rdma))


def test_this_machine_is_asked_as_well() -> None:
    """The real libraries, where there are any: with their own types and calls."""
    assert "RDMA: " in drivers.found("13.0", {})


CHANNELS = {  # as the format strings of NCCL 2.29 make them
    "one host": (
        "h:7:9 [0] NCCL INFO Using network Socket\n"
        "h:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n",
        "NCCL transport: P2P/CUMEM/read, network Socket",
    ),
    "InfiniBand": (
        "h:7:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>\n"
        "h:7:9 [0] NCCL INFO Using network IB\n"
        "h:7:9 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] [receive] via NET/IB/3/GDRDMA\n"
        "h:7:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] [send] via NET/IB/0(1)/GDRDMA\n",
        "NCCL transport: NET/IB/GDRDMA, network IB",
    ),
}


@pytest.mark.parametrize("name", CHANNELS)
def test_the_transport_is_read_from_nccls_log(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env: dict[str, str] = {}
    log = drivers.NcclLog(env, str(tmp_path))
    assert log.news() == ""
    path = Path(env["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())))
    lines, told = CHANNELS[name]
    with path.open("w", buffering=1) as nccl:  # NCCL opens the file once
        nccl.write(lines)
        with caplog.at_level(logging.INFO):
            log.tell()
        assert [(record.levelname, record.message) for record in caplog.records] == [("INFO", told)]
        assert path.stat().st_blocks == 0
        nccl.write(lines)
        assert log.news() == "", "the next communicator has the same transport"
        nccl.write("h:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct\n")
        assert log.news() == "NCCL transport: SHM/direct/direct"
        assert path.stat().st_size == 0


def test_sockets_where_rdma_was_given_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = {drivers.RDMA: "rdma/hca"}
    log = drivers.NcclLog(env, str(tmp_path))
    Path(env["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid()))).write_text("NCCL INFO Using network Socket\n")
    log.tell()
    assert "rdma/hca is not used" in caplog.messages[0]
    assert caplog.records[0].levelname == "WARNING"


def test_a_log_that_the_user_asked_for_stays_the_users(tmp_path: Path) -> None:
    env = {"NCCL_DEBUG": "WARN"}
    assert drivers.NcclLog(env, str(tmp_path)).news() == ""
    assert env == {"NCCL_DEBUG": "WARN"}
