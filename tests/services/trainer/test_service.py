"""A trainer as a process: exactness, idempotence, kill -9 and resume, export."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from diffusers import QwenImagePipeline
from redis import Redis

from flowfleet.data.blobs import SyncBlobs
from flowfleet.job.spec import JobSpec
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.proto import trainer_pb2
from flowfleet.redis import keys
from flowfleet.redis.client import connect_sync
from flowfleet.weights.lora import adapter_from_bytes
from services.trainer.__main__ import stop_when_idle
from services.trainer.model.engine import lora_spec
from tests.services.trainer.processes import Launch, Replica, Trainer
from tests.services.trainer.steps import JOB, Drawer, make_spec

REPLICAS = (("good", "none"), ("bad", "corrupt"), ("gone", "none"))


def published_adapter(redis_url: str, version: int) -> dict[str, torch.Tensor]:
    """The newest trainer's: one that was killed left its own under another key."""
    client: Redis = connect_sync(redis_url)
    found = client.scan_iter(match=keys.blob(JOB, "adapter", version) + ":*")
    data = client.get(max(found, key=lambda key: int(bytes(key).rsplit(b":", 1)[1])))
    assert isinstance(data, bytes)
    return adapter_from_bytes(data)


def curve(response: trainer_pb2.TrainStepResponse) -> dict[str, float]:
    """What must be equal bit for bit: all but timings and speeds."""
    return {name: value for name, value in response.metrics.items() if not name.startswith(("timing", "perf"))}


def velocity(pipeline: Any, drawer: Drawer, spec: JobSpec) -> torch.Tensor:
    """Velocity of the transformer in a `QwenImagePipeline`, at made-up inputs."""
    own = drawer.adapter
    adapter = type(own)(pipeline, own.vae_config, dtype=own.dtype, device=own.device)
    generator = torch.Generator().manual_seed(5)
    shape = drawer.adapter.latent_shape(spec.rollout.size)
    prompts = PromptEmbeds(torch.randn(2, 7, 32, generator=generator), torch.ones(2, 7, dtype=torch.bool))
    latents = torch.randn(2, *shape, generator=generator)
    with torch.no_grad():
        return adapter.velocity(latents, torch.tensor(700.0), prompts, size=spec.rollout.size)


def refused(code: grpc.StatusCode, call: Any, *args: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call(*args)
    error: Any = caught.value
    assert error.code() is code
    return str(error.details())


def test_steps_survive_replays_refusals_and_kills(
    tiny_qwen_image: Path, launch: Launch, blobs: SyncBlobs, redis_url: str, tmp_path: Path
) -> None:
    spec = make_spec(tiny_qwen_image)
    trainer: Trainer = launch(Trainer, spec, tmp_path)
    drawer = Drawer(spec)
    first = drawer.draw(blobs, 0)
    assert trainer.status().state == trainer_pb2.TRAINER_STATE_UNCONFIGURED
    refused(grpc.StatusCode.FAILED_PRECONDITION, trainer.train, first)
    assert trainer.configure() == trainer_pb2.ConfigureResponse(applied_steps=0, world_size=1)

    done = trainer.train(first)
    assert (done.policy_version, done.replayed) == (1, False)
    assert done.metrics["rollout_corr/exact"] == 1.0
    again = trainer.train(first)
    assert again.replayed
    assert dict(again.metrics) == dict(done.metrics)
    assert "expects step 1" in refused(grpc.StatusCode.FAILED_PRECONDITION, trainer.train, drawer.draw(blobs, 5))
    assert "holds version 1" in refused(grpc.StatusCode.FAILED_PRECONDITION, trainer.publish, 4)

    requests = [first]
    lost = drawer.draw(blobs, 1)
    blobs.delete([lost.samples[1].sample.trajectory])
    assert "job-1/1/0/1" in refused(grpc.StatusCode.NOT_FOUND, trainer.train, lost)
    responses = {}
    for step in (1, 2, 3):
        trainer.publish(step)
        drawer.load(published_adapter(redis_url, step), lora_spec(spec))
        requests.append(drawer.draw(blobs, step))
        responses[step] = trainer.train(requests[step])
        assert responses[step].metrics["rollout_corr/ratio_max_abs_dev"] == 0.0  # under a moving adapter as well
        if step == 1:
            assert trainer.save().applied_steps == 2
    digest = trainer.publish(4).weights_digest
    trainer.kill()

    resumed: Trainer = launch(Trainer, spec, tmp_path, name="resumed")
    answer = resumed.configure()
    assert answer.applied_steps == 2
    assert Path(answer.resumed_from) == tmp_path / "checkpoints" / "step-00000002"
    assert resumed.configure() == answer
    replayed = resumed.train(requests[1])
    assert replayed.replayed
    assert curve(replayed) == curve(responses[1])
    assert curve(resumed.train(requests[2])) == curve(responses[2])
    for answer_of_many in train_from_two_callers(resumed, requests[3], redis_url):
        assert curve(answer_of_many) == curve(responses[3])
    assert resumed.status().applied_steps == 4
    assert resumed.publish(4).weights_digest == digest

    check_publishing(resumed, launch, tmp_path)

    other = trainer_pb2.ConfigureRequest(job_id="other", spec_json=spec.model_dump_json(), directory=str(tmp_path))
    configure = resumed.stub.Configure
    assert "belongs to job job-1" in refused(grpc.StatusCode.FAILED_PRECONDITION, lambda: configure(other, timeout=60))
    exported = resumed.export(tmp_path / "model")
    drawer.load(published_adapter(redis_url, 4), lora_spec(spec))
    pipeline = QwenImagePipeline.from_pretrained(tiny_qwen_image)
    pipeline.load_lora_weights(exported)
    expected = velocity(drawer.adapter.pipeline, drawer, spec)
    torch.testing.assert_close(velocity(pipeline, drawer, spec), expected, rtol=0, atol=1e-6)
    pipeline.unload_lora_weights()
    assert not torch.allclose(velocity(pipeline, drawer, spec), expected, rtol=0, atol=1e-4)
    assert resumed.end() == 0


def train_from_two_callers(
    trainer: Trainer, request: trainer_pb2.TrainStepRequest, redis_url: str
) -> list[trainer_pb2.TrainStepResponse]:
    """One joins the other, and status is answered while Redis, paused, keeps their samples back."""
    answers: list[trainer_pb2.TrainStepResponse] = []
    callers = [threading.Thread(target=lambda: answers.append(trainer.train(request))) for _ in range(2)]
    states: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            states.append(trainer.status().state)

    watcher = threading.Thread(target=watch)
    watcher.start()
    while not states:
        time.sleep(0.001)
    with Redis.from_url(redis_url) as client:
        client.client_pause(500)
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    over.set()
    watcher.join()
    assert trainer_pb2.TRAINER_STATE_BUSY in states
    return answers


def check_publishing(trainer: Trainer, launch: Launch, tmp_path: Path) -> None:
    """A replica that is gone and one that loads something else do not stop the third."""
    good, bad, gone = (launch(Replica, tmp_path, name=name, fault=fault) for name, fault in REPLICAS)
    gone.address()
    gone.kill()
    response = trainer.publish(4, good, bad, gone)
    results = {result.replica_id: result for result in response.results}
    assert {name: result.ok for name, result in results.items()} == {"good": True, "bad": False, "gone": False}
    assert "do not match the hash" in results["bad"].error
    assert "UNAVAILABLE" in results["gone"].error
    assert response.bytes > 0
    assert response.update_seconds > 0
    assert response.drain_seconds + response.update_seconds < response.seconds
    status = good.status()
    assert (status.policy_version, status.weights_digest) == (4, response.weights_digest)


async def test_a_trainer_that_nobody_calls_ends() -> None:
    class Service:
        idle_s = 0.0  # seconds

    service, stop = Service(), asyncio.Event()
    task = asyncio.create_task(stop_when_idle(service, 0.01, stop))
    await asyncio.sleep(0.05)
    assert not stop.is_set()
    service.idle_s = 0.02
    await asyncio.wait_for(stop.wait(), 5)
    await task
