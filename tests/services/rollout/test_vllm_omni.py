"""The vLLM-Omni engine, real, on the CPU: the diffusers engine's own promises, and its numbers against that one's."""

import asyncio
import importlib.util
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flowfleet.algorithms.samplers import SamplerName
from flowfleet.data.trajectories import FinalLatents
from flowfleet.errors import DataLoss
from flowfleet.models.base import ModelAdapter
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Size
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.weights import lora, weights
from services.rollout.engines.base import Cancelled, GeneratedBatch, GeneratedSample, GenerationRequest, PromptGroup
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.engines.vllm_omni.engine import VllmOmniEngine
from tests.filling import filling
from tests.services.rollout.conftest import LORA, make_request, path_of
from tests.services.rollout.replica import make_adapter
from tests.services.rollout.test_engine import (  # The tests among these run here as well, on this file's engine.
    Recorder,
    Sender,
    assert_same,
    collect,
    recomputed,
    samples_of,
    test_a_group_can_share_its_initial_noise,  # noqa: F401
    test_a_model_that_is_not_there_is_the_users_mistake,  # noqa: F401
    test_a_sample_depends_on_its_own_seed_only,  # noqa: F401
    test_an_adapter_replaces_another_and_leaves_without_trace,  # noqa: F401
    test_cancelled_work_stops_at_the_next_step,  # noqa: F401
    test_full_weights_are_received_whole_and_the_next_job_gets_the_base_back,  # noqa: F401
    test_full_weights_have_no_reference_kl,  # noqa: F401
    test_ode_draws_what_the_diffusers_pipeline_draws,  # noqa: F401
    test_repeated_requests_make_the_same_bits,  # noqa: F401
    test_the_reference_kl_changes_no_sample_and_is_0_before_training,  # noqa: F401
    test_the_reference_kl_is_that_of_the_steps_with_and_without_adapter,  # noqa: F401
    test_verify_refuses_one_wrong_element_and_a_missing_name,  # noqa: F401
)

CPU = torch.device("cpu")
ALL_TARGETS = LoraSpec(
    rank=4,
    alpha=6.0,  # 6 / 4 is not a power of two: B is rounded when it is scaled.
    target_modules=[
        *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2", "img_in", "proj_out"),
    ],
)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmOmniEngine]:
    engine = VllmOmniEngine(CPU, max_batch=8, threads=1)
    yield engine
    run(engine.close())


@pytest.fixture(scope="module")
def other() -> Iterator[DiffusersEngine]:
    other = DiffusersEngine(CPU, max_batch=8, threads=1)
    yield other
    run(other.close())


def of_both(
    engine: VllmOmniEngine, other: DiffusersEngine, request: GenerationRequest
) -> Sequence[tuple[GeneratedSample, GeneratedSample]]:
    """Pairs of the same sample, drawn by each."""
    ours, theirs = samples_of(run(collect(engine, request))), samples_of(run(collect(other, request)))
    assert [(s.group, s.index, s.seed) for s in ours] == [(s.group, s.index, s.seed) for s in theirs]
    return list(zip(ours, theirs, strict=True))


def gap(one: torch.Tensor, two: torch.Tensor) -> float:
    assert one.shape == two.shape
    assert one.dtype == two.dtype
    return (one - two).abs().max().item()


@pytest.mark.parametrize("step_type", ["sde", "cps", "dance_sde"])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_trajectories_equal_the_diffusers_engines(
    engine: VllmOmniEngine, other: DiffusersEngine, model: ModelSpec, step_type: str, guidance_scale: float
) -> None:
    """In float32 on the CPU both multiply and attend by the same kernels: the whole trajectory is the same, bit for
    bit. The two prompts differ in length, so one is masked."""
    for prepared in (engine, other):
        run(prepared.prepare(model, None))
    request = make_request(step_type=step_type, guidance_scale=guidance_scale, sde_steps=(0, 1, 2, 3))
    pairs = of_both(engine, other, request)
    assert len(pairs) == 6
    for ours, theirs in pairs:
        assert path_of(ours).latents.shape[0] == 4
        assert gap(path_of(ours).latents, path_of(theirs).latents) == 0
        assert gap(path_of(ours).next_latents, path_of(theirs).next_latents) == 0
        assert gap(path_of(ours).log_probs, path_of(theirs).log_probs) == 0
        assert np.array_equal(ours.frames, theirs.frames)


@pytest.mark.parametrize(("sde_steps", "sampler", "tail_steps"), [((), "dpm_solver_2", 0), ((0, 1), "euler", 2)])
def test_second_order_samples_equal_the_diffusers_engines(
    engine: VllmOmniEngine,
    other: DiffusersEngine,
    model: ModelSpec,
    sde_steps: tuple[int, ...],
    sampler: SamplerName,
    tail_steps: int,
) -> None:
    for prepared in (engine, other):
        run(prepared.prepare(model, None))
    request = make_request(
        sde_steps=sde_steps, num_steps=6, sampler=sampler, tail_steps=tail_steps, record="final", guidance_scale=4.0
    )
    for ours, theirs in of_both(engine, other, request):
        assert isinstance(ours.record, FinalLatents)
        assert isinstance(theirs.record, FinalLatents)
        assert gap(ours.record.latents, theirs.record.latents) <= 1e-4


@pytest.mark.parametrize("record", ["none", "steps", "final"])
def test_records_and_embeds_equal_the_diffusers_engines(
    engine: VllmOmniEngine, other: DiffusersEngine, model: ModelSpec, record: Any
) -> None:
    for prepared in (engine, other):
        run(prepared.prepare(model, None))
    request = make_request(record=record, guidance_scale=2.0, sde_steps=(1, 3), size=Size(48, 32))
    (ours,), (theirs,) = run(collect(engine, request)), run(collect(other, request))
    for one, two in zip(ours.samples, theirs.samples, strict=True):
        assert type(one.record) is type(two.record)
        if isinstance(one.record, FinalLatents) and isinstance(two.record, FinalLatents):
            assert gap(one.record.latents, two.record.latents) <= 1e-4
        assert_same(one, two)
    for kind in ("embeds", "negative"):
        found, expected = getattr(ours, kind), getattr(theirs, kind)
        assert found.keys() == expected.keys() == {0, 1}
        for group, embeds in found.items():
            assert gap(embeds.embeds, expected[group].embeds) <= 1e-5
            assert torch.equal(embeds.mask, expected[group].mask)
    assert ours.seconds.keys() == theirs.seconds.keys()


def test_batches_are_those_of_the_diffusers_engine(
    engine: VllmOmniEngine, model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(engine.prepare(model, None))
    whole = samples_of(run(collect(engine, make_request())))
    monkeypatch.setattr(engine, "_max_batch", 2)
    cut = run(collect(engine, make_request()))
    assert [[(s.group, s.index) for s in batch.samples] for batch in cut] == [
        [(0, 0), (0, 1)],
        [(0, 2), (1, 0)],
        [(1, 1), (1, 2)],
    ]
    for one, two in zip(whole, samples_of(cut), strict=True):
        assert gap(path_of(one).next_latents, path_of(two).next_latents) <= 1e-4


def trainer_of(model: ModelSpec, spec: LoraSpec | None, state: dict[str, torch.Tensor]) -> ModelAdapter:
    """The trainer's end: its transformer, with gradients for what it trains."""
    adapter = adapter_for(model.path).load(model.path, dtype=torch.float32, components=("transformer",))
    if spec is not None:
        lora.install_lora(adapter.experts, spec)
        lora.load_adapter(adapter.experts, state)
    else:
        adapter.transformer.requires_grad_(True)
    return adapter


@pytest.mark.parametrize("spec", [None, LORA])
def test_log_probs_equal_the_trainers(engine: VllmOmniEngine, model: ModelSpec, spec: LoraSpec | None) -> None:
    """Exactly for full weights; vLLM adds an adapter's part in one operation, PEFT in two."""
    state = make_adapter(model, spec, 5) if spec else {}
    run(engine.prepare(model, spec))
    if spec is not None:
        run(engine.load_adapter(state))
    request = make_request(guidance_scale=3.0, sde_steps=(0, 1, 2))
    (batch,) = run(collect(engine, request))
    adapter = trainer_of(model, spec, state)
    for step in range(3):
        stored = torch.stack([path_of(sample).log_probs[step] for sample in batch.samples])
        assert gap(recomputed(adapter, request, batch, step).detach(), stored) <= (1e-4 if spec else 0)


def test_adapters_draw_what_they_draw_on_diffusers(
    engine: VllmOmniEngine, other: DiffusersEngine, model: ModelSpec
) -> None:
    """On every target, among them those that vLLM-Omni fuses or has under a second name."""
    base = samples_of(run(collect_prepared(engine, model, None)))
    for spec, seed in ((ALL_TARGETS, 1), (LORA, 2)):
        state = make_adapter(model, spec, seed)
        for prepared in (engine, other):
            run(prepared.prepare(model, spec))
            run(prepared.load_adapter(state))
        hashes = weights.tensor_hashes(state.items())
        assert run(engine.verify(hashes)) == run(other.verify(hashes)) == weights.digest(hashes)
        for ours, theirs in of_both(engine, other, make_request()):
            assert gap(path_of(ours).next_latents, path_of(theirs).next_latents) <= 1e-4
            assert gap(path_of(ours).log_probs, path_of(theirs).log_probs) <= 1e-4
        assert gap(path_of(ours).next_latents, path_of(base[-1]).next_latents) > 0.01


async def collect_prepared(engine: VllmOmniEngine, model: ModelSpec, spec: LoraSpec | None) -> list[GeneratedBatch]:
    await engine.prepare(model, spec)
    return await collect(engine, make_request())


@pytest.mark.parametrize("target", ["img_in", "proj_out", "to_out.0", "add_v_proj", "txt_mlp.net.0.proj"])
def test_each_target_is_adapted(engine: VllmOmniEngine, model: ModelSpec, target: str) -> None:
    """A layer that is wrapped but not called would leave the picture as it is."""
    spec = LoraSpec(rank=2, alpha=4.0, target_modules=[target])
    base = path_of(samples_of(run(collect_prepared(engine, model, spec)))[0])
    run(engine.load_adapter(make_adapter(model, spec, 3)))
    assert gap(path_of(samples_of(run(collect(engine, make_request())))[0]).next_latents, base.next_latents) > 1e-4


def test_adapted_layers_compile_whole(engine: VllmOmniEngine, model: ModelSpec) -> None:
    """Also where one of three fused parts has no adapter. Compiled by nothing: what is tested is that it is one graph,
    and its sums."""
    spec = LoraSpec(rank=4, alpha=8.0, target_modules=["to_q", "to_v", "add_k_proj", "to_out.0", "img_mlp.net.2"])

    def compiled_and_eager(worker: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        block = worker.model_runner.pipeline.transformer.transformer_blocks[0]
        made = []
        for layer in (block.attn.to_qkv, block.attn.add_kv_proj, block.attn.to_out, block.img_mlp.net[2]):
            x = torch.randn(2, 6, layer.input_size, generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                compiled: Any = torch.compile(layer, backend="eager", fullgraph=True)
                made.append((compiled(x), layer(x)))
        return [tuple(y[0] if isinstance(y, tuple) else y for y in pair) for pair in made]

    run(engine.prepare(model, spec))
    run(engine.load_adapter(make_adapter(model, spec, 4)))
    for compiled, eager in run(engine._perform("prepare", compiled_and_eager)):
        assert gap(compiled, eager) <= 1e-5
        assert eager.abs().max() > 0


def test_a_merged_adapter_samples_as_the_diffusers_engine_merges_it(
    engine: VllmOmniEngine, other: DiffusersEngine, model: ModelSpec
) -> None:
    """The adapter's reference is the base without it, and the next adapter replaces this one."""
    merged = LoraSpec(rank=LORA.rank, alpha=LORA.alpha, target_modules=LORA.target_modules, merged=True)
    request = replace(make_request(), reference_kl=True)
    drawn = []
    for seed in (5, 6):
        for spec in (LORA, merged):
            for it in (engine, other):
                run(it.prepare(model, spec))
                run(it.load_adapter(make_adapter(model, spec, seed)))
            ours, theirs = of_both(engine, other, request)[0]
            assert gap(path_of(ours).log_probs, path_of(theirs).log_probs) <= 1e-4
            assert ours.reference_kl == pytest.approx(theirs.reference_kl, rel=1e-2)
            assert ours.reference_kl > 0
            drawn.append(path_of(ours).next_latents)
    separate, merged_one, second, merged_second = drawn
    assert gap(separate, merged_one) <= 1e-3
    assert gap(second, merged_second) <= 1e-3
    assert gap(merged_one, merged_second) > 0.01


def sent(tensors: dict[str, torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Buckets, and the bytes that a trainer would broadcast."""
    buckets = weights.make_buckets(weights.specs_of(tensors), bucket_bytes=100_000)
    recorder = Recorder()
    weights.send(recorder, buckets, filling(tensors))
    return buckets, recorder.flats


def test_an_adapter_can_come_by_broadcast(engine: VllmOmniEngine, model: ModelSpec) -> None:
    state = make_adapter(model, LORA, 7)
    run(engine.prepare(model, LORA))
    run(engine.load_adapter(state))
    expected = samples_of(run(collect(engine, make_request())))
    run(engine.load_adapter(make_adapter(model, LORA, 8)))
    buckets, flats = sent(state)
    run(engine.receive(Sender(flats), buckets))
    run(engine.verify(weights.tensor_hashes(state.items())))
    for one, two in zip(expected, samples_of(run(collect(engine, make_request()))), strict=True):
        assert_same(one, two)


def test_full_weights_that_were_torn_are_told(engine: VllmOmniEngine, other: DiffusersEngine, model: ModelSpec) -> None:
    run(engine.prepare(model, None))
    adapter = adapter_for(model.path).load(model.path, dtype=torch.float32, components=("transformer",))
    trained = {name: value + 0.01 for name, value in weights.full_parameters(adapter.experts).items()}
    hashes = weights.tensor_hashes(trained.items())
    torn = "transformer.transformer_blocks.0.attn.to_k.weight"
    run(engine.receive(*reversed_arguments(sent(trained | {torn: trained[torn].flip(0)}))))
    with pytest.raises(DataLoss, match=torn):
        run(engine.verify(hashes))
    run(engine.receive(*reversed_arguments(sent(trained))))
    run(engine.verify(hashes))
    run(other.prepare(model, None))
    run(other.receive(*reversed_arguments(sent(trained))))
    for ours, theirs in of_both(engine, other, make_request()):
        assert_same(ours, theirs)


def reversed_arguments(bucketed: tuple[Any, list[torch.Tensor]]) -> tuple[Any, Any]:
    return Sender(bucketed[1]), bucketed[0]


def test_work_in_hand_is_finished_before_weights_change(
    engine: VllmOmniEngine, model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch runs and two wait while an adapter comes: the first is drawn by the old one, the others by the new."""
    state = make_adapter(model, LORA, 9)
    monkeypatch.setattr(engine, "_max_batch", 1)
    request = replace(make_request(), groups=(PromptGroup(0, "A red sign", (0, 1, 2), (5, 5, 5)),))
    steps = 0

    def count() -> bool:
        nonlocal steps
        steps += 1
        return False

    async def scenario() -> list[GeneratedBatch]:
        await engine.prepare(model, LORA)
        drawing = asyncio.create_task(collect(engine, request, count))
        while not steps:
            await asyncio.sleep(0.001)
        await engine.load_adapter(state)
        return await drawing

    run(engine.prepare(model, None))
    before, *_ = samples_of(run(collect(engine, request)))
    first, second, third = samples_of(run(scenario()))
    after, *_ = samples_of(run(collect(engine, request)))
    assert torch.equal(path_of(first).next_latents, path_of(before).next_latents)
    for sample in (second, third):
        assert torch.equal(path_of(sample).next_latents, path_of(after).next_latents)
    assert gap(path_of(before).next_latents, path_of(after).next_latents) > 0.01


def test_an_abandoned_request_stops_within_a_step(engine: VllmOmniEngine, model: ModelSpec) -> None:
    """Its caller goes away: vLLM-Omni aborts it, and the next request does not wait for its 1000 steps."""
    run(engine.prepare(model, None))
    steps = 0

    def count() -> bool:
        nonlocal steps
        steps += 1
        return False

    async def scenario() -> int:
        drawing = asyncio.create_task(collect(engine, make_request(num_steps=1000, sde_steps=(1,)), count))
        while steps < 3:
            await asyncio.sleep(0.001)
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing
        abandoned = steps
        assert len(samples_of(await collect(engine, make_request()))) == 6
        return abandoned

    abandoned = run(scenario())
    assert steps <= abandoned + 1 < 1000


def test_a_pause_that_fails_is_undone(
    engine: VllmOmniEngine, model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AsyncOmni takes no request from the first moment of a pause on, and its scheduler may not answer then."""
    run(engine.prepare(model, LORA))
    state = make_adapter(model, LORA, 9)
    answering = engine._omni._engine_core_rpc

    async def silent(method: str, **arguments: Any) -> Any:
        if method == "pause_scheduler":
            raise RuntimeError("no answer")
        return await answering(method, **arguments)

    async def is_paused() -> bool:
        paused: bool = await engine._loop.submit(engine._omni.is_paused())
        return paused

    with monkeypatch.context() as patch:
        patch.setattr(engine._omni, "_engine_core_rpc", silent)
        with pytest.raises(RuntimeError, match="no answer"):
            run(engine.load_adapter(state))
    assert not run(is_paused())
    run(engine.load_adapter(state))
    assert len(samples_of(run(collect(engine, make_request())))) == 6


@pytest.mark.parametrize(("is_cancelled", "told"), [(False, RuntimeError), (True, Cancelled)])
def test_a_batch_that_vllm_omni_gave_up_is_no_batch_that_nobody_wants(
    engine: VllmOmniEngine,
    model: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
    is_cancelled: bool,
    told: type[Exception],
) -> None:
    """It ends a request that it aborts, or that is left at its shutdown, as one that is done."""

    async def ends_at_once(*_: Any, **__: Any) -> AsyncIterator[None]:
        for nothing in tuple[None, ...]():
            yield nothing

    run(engine.prepare(model, None))
    monkeypatch.setattr(engine._omni, "generate", ends_at_once)
    with pytest.raises(told, match=None if is_cancelled else "abandoned a task"):
        run(collect(engine, make_request(), lambda: is_cancelled))


def test_stalls_are_told(engine: VllmOmniEngine, model: ModelSpec) -> None:
    run(engine.prepare(model, None))
    assert engine.pulse.stalled_s() == 0.0
    seen = []

    def slow() -> bool:
        time.sleep(0.05)
        seen.append(engine.pulse.stalled_s())
        return False

    run(collect(engine, make_request(), slow))
    assert len(seen) == 4
    assert all(0.05 <= seconds < 5 for seconds in seen)
    assert engine.pulse.stalled_s() == 0.0


def test_what_it_cannot_do_is_said(engine: VllmOmniEngine, model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    run(engine.prepare(model, None))
    with pytest.raises(ValueError, match="does not compile for CPUs"):
        run(engine.prepare(ModelSpec(path=model.path, dtype="float32", compile=True), None))
    with pytest.raises(ValueError, match=r"rollout.quantization = 'fp8'"):
        run(engine.prepare(ModelSpec(path=model.path, dtype="float32", quantization="fp8"), None))
    with pytest.raises(ValueError, match="rank"):
        run(engine.prepare(model, LoraSpec(rank=100_000, alpha=1.0, target_modules=["to_q"])))
    with pytest.raises(ValueError, match="make only that one visible"):
        VllmOmniEngine(torch.device("cuda:1"), max_batch=1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="make vllm-omni"):
        VllmOmniEngine(CPU, max_batch=1)


@pytest.mark.long
def test_vllm_omni_starts_anew_for_another_model_and_dummy_weights_are_those_of_diffusers(
    engine: VllmOmniEngine, other: DiffusersEngine, model: ModelSpec
) -> None:
    """What was shut down leaves nothing behind that the next one in this process trips over."""
    run(engine.prepare(model, None))
    first = engine._omni
    base = samples_of(run(collect(engine, make_request())))
    dummy = ModelSpec(path=model.path, dtype="float32", load_format="dummy")
    for prepared in (engine, other):
        run(prepared.prepare(dummy, None))
    assert engine._omni is not first
    for ours, theirs in of_both(engine, other, make_request()):
        assert_same(ours, theirs)
    assert not np.array_equal(ours.frames, base[-1].frames)
