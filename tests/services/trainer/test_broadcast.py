"""Which way the weights go, by where trainer and replicas compute."""

import pytest
import torch

from flowfleet import devices
from flowfleet.proto.rollout_pb2 import RolloutStatus
from services.trainer.broadcast import common_backend

GPU = torch.device("cuda", 0)


def status(device_id: str, device: str = "cuda:0") -> RolloutStatus:
    return RolloutStatus(device=device, device_id=device_id)


@pytest.fixture(autouse=True)
def own_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    real = devices.identity
    monkeypatch.setattr(devices, "identity", lambda device: "gpu-0" if device == GPU else real(device))


@pytest.mark.parametrize(
    ("replicas", "backend"),
    [
        ([status("gpu-1"), status("gpu-2")], "nccl"),
        ([], "nccl"),
        ([status("gpu-1"), status("gpu-0")], "gloo"),  # one shares the trainer's
        ([status("gpu-1"), status("gpu-1")], "gloo"),  # two share one
        ([status("gpu-1"), status("", "cpu")], "gloo"),
        ([status("npu-1", "npu:0")], "gloo"),
        ([status("")], "gloo"),  # says nothing of its device
    ],
)
def test_nccl_is_taken_where_every_member_has_a_gpu_to_itself(replicas: list[RolloutStatus], backend: str) -> None:
    assert common_backend(GPU, replicas) == backend


def test_the_cpu_has_gloo_alone() -> None:
    assert common_backend(torch.device("cpu"), [status("", "cpu")]) == "gloo"
    assert common_backend(torch.device("cpu"), [status("gpu-1")]) == "gloo"
