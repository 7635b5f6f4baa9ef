"""A rank's own sampler, held to a rollout's engine bit for bit, and to what an update must not change."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowfleet.data.blobs import SyncBlobs
from flowfleet.job.spec import JobSpec
from flowfleet.process.pulse import Pulse
from flowfleet.proto.trainer_pb2 import PublishWeightsRequest
from flowfleet.quantization import layers
from flowfleet.weights import weights
from services.rollout.engines.base import GeneratedBatch, GeneratedSample
from services.rollout.engines.diffusers import DiffusersEngine
from services.trainer.model.engine import lora_spec, model_spec
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.sharding import local
from services.trainer.sampling.engine import SharingEngine
from services.trainer.turns import Turns
from services.trainer.worker import Worker
from tests.services.rollout.conftest import make_request
from tests.services.rollout.test_engine import assert_same, collect, samples_of
from tests.services.trainer.steps import JOB, make_spec
from tests.services.trainer.workers import engine_of, make_worker, state_of

SAMPLES = {"samples": "only"}
REQUEST = replace(make_request(guidance_scale=2.0), reference_kl=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["plain", "fp8"])
def worker(
    request: pytest.FixtureRequest,
    tiny_qwen_image: Path,
    ranks: Ranks,
    files: SyncBlobs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Worker:
    monkeypatch.setattr(layers, "MIN_SIZE", 16)
    model = {"dtype": "bfloat16", "base": request.param}
    worker = make_worker(make_spec(tiny_qwen_image, model=model, trainer=SAMPLES), ranks, files, tmp_path)
    update(worker)
    return worker


def update(worker: Worker) -> None:
    """Moves what is trained by far more than bfloat16 resolves."""
    generator = torch.Generator().manual_seed(7)
    for parameter in engine_of(worker).trained.values():
        shard = local(parameter)
        shard.add_(torch.randn(shard.shape, generator=generator), alpha=0.05)


async def sampled(engine: DiffusersEngine) -> list[GeneratedSample]:
    return samples_of(await collect(engine, REQUEST))


async def by_a_rollout(spec: JobSpec, state: dict[str, torch.Tensor]) -> list[GeneratedSample]:
    engine = DiffusersEngine(torch.device("cpu"), max_batch=256, threads=1)
    await engine.prepare(model_spec(spec), lora_spec(spec))
    await engine.load_adapter(state)
    try:
        return await sampled(engine)
    finally:
        await engine.close()


async def test_a_rank_makes_a_rollouts_bits_from_one_copy_of_the_base(worker: Worker) -> None:
    trained = engine_of(worker)
    spec, state = trained.spec, state_of(worker)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    expected = await by_a_rollout(spec, state)
    engine = SharingEngine(trained, worker.turns, worker.shared_adapter)
    await engine.prepare(model_spec(spec), lora_spec(spec))
    shared = worker.share_adapter(PublishWeightsRequest(job_id=JOB, version=0))
    await engine.load_shared()
    assert await engine.verify(shared.hashes) == weights.digest(weights.tensor_hashes(state.items()))
    for one, other in zip(await sampled(engine), expected, strict=True):
        assert one.reference_kl == other.reference_kl > 0
        assert_same(one, other)

    assert engine._adapter is not None
    own, base = engine._adapter.transformer, trained.adapter.transformer
    name = "transformer_blocks.0.attn.to_q.base_layer.weight"
    assert own.get_parameter(name).data_ptr() == base.get_parameter(name).data_ptr()
    dtype = {"plain": torch.bfloat16, "fp8": torch.float8_e4m3fn}[spec.model.base]
    assert own.get_parameter(name).dtype == base.get_parameter(name).dtype == dtype

    update(worker)  # changes the masters alone: what was published is sampled until the next version
    for one, other in zip(await sampled(engine), expected, strict=True):
        assert_same(one, other)
    with pytest.raises(ValueError, match="it samples for that job alone"):
        await engine.prepare(model_spec(spec), None)
    await engine.close()


async def test_a_batch_without_room_is_made_again_without_the_graphs_of_updates(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, sample, lacks, holds = engine_of(worker), DiffusersEngine._sample, [True, False, False], [True, True]

    def limited(self: DiffusersEngine, *args: Any) -> GeneratedBatch:
        if lacks.pop(0):
            raise torch.OutOfMemoryError
        return sample(self, *args)

    monkeypatch.setattr(DiffusersEngine, "_sample", limited)
    monkeypatch.setattr(trained, "make_room", lambda: bool(holds) and holds.pop())
    engine = SharingEngine(trained, worker.turns, worker.shared_adapter)
    await engine.prepare(model_spec(trained.spec), lora_spec(trained.spec))
    await engine.load_adapter(state_of(worker))
    first, second = await sampled(engine), await sampled(engine)
    assert not holds, "later batches free them first"
    for one, other in zip(first, second, strict=True):
        assert_same(one, other)
    lacks[:] = [True]
    with pytest.raises(torch.OutOfMemoryError):
        await sampled(engine)
    await engine.close()


def test_ranks_go_on_together_once_each_holds_the_adapter(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 asks all of them to take it as soon as it is done itself."""
    held_at_meetings: list[int] = []

    @contextmanager
    def together() -> Iterator[None]:
        yield
        held_at_meetings.append(len(worker._shared))

    monkeypatch.setattr(worker.ranks, "together", together)
    worker.share_adapter(PublishWeightsRequest(job_id=JOB, version=0))
    assert held_at_meetings == [len(engine_of(worker).trained)]


async def test_an_update_passes_between_two_denoising_steps_and_changes_no_bit(worker: Worker) -> None:
    trained, begun = engine_of(worker), threading.Event()
    seen: list[str] = []
    engine = SharingEngine(trained, worker.turns, worker.shared_adapter)
    await engine.prepare(model_spec(trained.spec), lora_spec(trained.spec))
    await engine.load_adapter(state_of(worker))
    undisturbed = await sampled(engine)

    def train() -> None:
        begun.wait(10)
        with worker.turns.training():
            before = len(seen)
            update(worker)
            seen.append("update")
            assert len(seen) == before + 1, "nothing samples inside an update"

    def cancelled() -> bool:
        """Is asked before every step."""
        if len(seen) == 1:
            begun.set()
            while not worker.turns._training:
                pass
        seen.append("step")
        return False

    trainer = threading.Thread(target=train)
    trainer.start()
    disturbed = samples_of(await collect(engine, REQUEST, cancelled))
    trainer.join(10)
    assert seen == ["step", "step", "update", "step", "step"]
    for one, other in zip(disturbed, undisturbed, strict=True):
        assert_same(one, other)
    await engine.close()


def test_sampling_that_waits_for_an_update_is_not_stuck() -> None:
    now = 0.0
    pulse, turns, waiting = Pulse(5.0, 5.0, shared=True, clock=lambda: now), Turns(), threading.Event()

    def beat() -> None:
        pulse.beat()
        waiting.set()

    def sample() -> None:
        with pulse.work("sample"), turns.sampling(beat):
            assert not turns._training

    with turns.training():
        sampler = threading.Thread(target=sample)
        sampler.start()
        assert waiting.wait(10)
        now = 100.0
        assert pulse.is_stuck
        waiting.clear()
        assert waiting.wait(10)
        assert not pulse.is_stuck
    sampler.join(10)
    assert not sampler.is_alive()
