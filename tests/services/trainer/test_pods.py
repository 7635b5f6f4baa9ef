"""A trainer in two pods: each of them may end in any way, and the Job ends as it should, soon."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flowfleet.data.blobs import SyncBlobs
from flowfleet.proto import trainer_pb2
from tests.services.trainer.pods import TOKEN, Pods
from tests.services.trainer.processes import Launch
from tests.services.trainer.steps import JOB, Drawer, make_spec

pytestmark = pytest.mark.long

SOON_S = 30.0
"""terminationGracePeriodSeconds of pods that do not set it."""


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFLEET_RPC_TOKEN", TOKEN)
    monkeypatch.delenv("FLOWFLEET_TLS_DIR", raising=False)


def test_two_pods_train_and_complete_when_nobody_calls(
    tiny_qwen_image: Path, launch: Launch, blobs: SyncBlobs, tmp_path: Path
) -> None:
    """Exit code 0 of both completes the Job."""
    spec = make_spec(tiny_qwen_image, trainer={"world_size": 2})
    pods = Pods(launch, tmp_path, flags=("--idle-exit-s", "5"))
    assert pods.configure(spec).world_size == 2
    response = pods.call("TrainStep", Drawer(spec).draw(blobs, 0))
    assert response.metrics["actor/grad_norm"] > 0
    assert pods.codes(SOON_S, lambda: None) == [0, 0]
    for rank in (0, 1):  # what the pods themselves wrote is gone with them
        assert "configured at version 0" in (tmp_path / "logs" / f"rank-{rank}.log").read_text()


@pytest.mark.parametrize("victim", ["rank 0", "torchrun of rank 0"])
def test_the_other_pod_ends_with_rank_0(victim: str, launch: Launch, tmp_path: Path) -> None:
    pods = Pods(launch, tmp_path)
    process = pods.pods[0].rank if victim == "rank 0" else pods.pods[0].agent
    first, second = pods.codes(SOON_S, process.kill)
    assert first not in (0, None)
    assert second == 1
    assert "lost rank 0" in pods.pods[1].log.read_text()


def test_rank_0_ends_at_the_next_command_after_the_other_pod(
    tiny_qwen_image: Path, launch: Launch, tmp_path: Path
) -> None:
    """Idle, it does not hear of it; the Job fails by the dead pod, and its controller ends rank 0's."""
    pods = Pods(launch, tmp_path)
    assert pods.codes(5.0, pods.pods[1].rank.kill)[1] == 1
    began = time.monotonic()
    with pytest.raises(Exception, match="failed inside"):
        pods.configure(make_spec(tiny_qwen_image, trainer={"world_size": 2}))
    assert time.monotonic() - began < SOON_S
    assert pods.codes(SOON_S, lambda: None) == [1, 1]


def test_two_pods_complete_when_their_job_is_over(tiny_qwen_image: Path, launch: Launch, tmp_path: Path) -> None:
    pods = Pods(launch, tmp_path)
    pods.configure(make_spec(tiny_qwen_image, trainer={"world_size": 2}))
    assert pods.codes(SOON_S, lambda: pods.call("End", trainer_pb2.EndTrainerRequest())) == [0, 0]


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_preempted_trainer_saves_its_adapter_or_says_what_is_lost(
    mode: str, tiny_qwen_image: Path, launch: Launch, blobs: SyncBlobs, tmp_path: Path
) -> None:
    """A preemption and a drain send SIGTERM to the pods; torchrun hands it on."""
    spec = make_spec(tiny_qwen_image, trainer={"world_size": 2, "mode": mode})
    pods = Pods(launch, tmp_path)
    pods.configure(spec)
    drawer = Drawer(spec)
    pods.call("TrainStep", drawer.draw(blobs, 0))
    pods.call("SaveCheckpoint", trainer_pb2.SaveCheckpointRequest(job_id=JOB))
    for step in (1, 2):
        pods.call("TrainStep", drawer.draw(blobs, step))
    codes = pods.codes(SOON_S, lambda: [pod.agent.terminate() for pod in pods.pods])
    assert None not in codes
    said = pods.pods[0].log.read_text()
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    if mode == "full":
        assert "full weights are not saved on a signal; steps since checkpoint 1 will be repeated: 2" in said
        assert saved == ["step-00000001"]
        return
    assert "saved " in said
    assert saved == ["step-00000001", "step-00000003"]
    assert Pods(launch, tmp_path).configure(spec).applied_steps == 3


@pytest.mark.parametrize("evicted", [0, 1])
def test_an_evicted_pod_ends_in_time_and_fails_the_job(evicted: int, launch: Launch, tmp_path: Path) -> None:
    pods = Pods(launch, tmp_path)
    began = time.monotonic()
    pods.pods[evicted].agent.terminate()
    assert pods.pods[evicted].ended_within(SOON_S) != 0
    assert time.monotonic() - began < SOON_S
    other = pods.pods[1 - evicted]
    if evicted == 0:
        assert other.ended_within(SOON_S) == 0  # rank 0 told it to stop
    else:
        other.agent.terminate()  # as the Job's controller does
        other.ended_within(SOON_S)
