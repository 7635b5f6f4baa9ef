"""The vLLM engine, real, on the CPU: tokens and log-probs against transformers' own forward, seeds, stops, weights."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowfleet.errors import DataLoss
from flowfleet.models.registry import sequence_adapter_for
from flowfleet.models.sequences.adapter import SequenceAdapter, Tokens
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.weights import lora as adapters
from flowfleet.weights import weights
from services.rollout.engines.base import (
    Cancelled,
    GeneratedSample,
    GenerationRequest,
    PromptGroup,
    SequenceSampling,
)
from services.rollout.engines.vllm.engine import VllmEngine
from tests.filling import filling
from tests.services.rollout.test_engine import Recorder, Sender
from tests.services.rollout.test_transformers_engine import asked, generated, group, tokens_of
from tests.services.rollout.test_transformers_engine import model as model

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
LORA = LoraSpec(rank=3, alpha=4.0, target_modules=["q_proj", "v_proj", "o_proj"])
"""4 / 3 is not a power of two: B is rounded when it is scaled. Rank 3 lies in vLLM's layers of rank 8."""
SETTINGS = SequenceSampling(max_tokens=12)
LONG = "1+1=" * 40 + "?"
"""161 tokens: more than a block of vLLM's cache."""
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(loop: asyncio.AbstractEventLoop) -> Iterator[VllmEngine]:
    made = VllmEngine(CPU, max_batch=8, threads=1)
    yield made
    loop.run_until_complete(made.close())


@pytest.fixture
def reference(model: ModelSpec) -> SequenceAdapter:
    """The trainer's own model and log-probs."""
    return sequence_adapter_for(model.path).load(model.path, dtype=torch.float32)


@torch.no_grad()
def assert_agrees(reference: SequenceAdapter, prompt: str, sample: GeneratedSample, temperature: float = 1.0) -> None:
    """The trainer's log-probs are the sample's: with the sample's experts, if it has some, and with its own."""
    record = tokens_of(sample)
    for experts in {None: None, 1: record.routed_experts}.values():
        again = Tokens(reference.encode(prompt), record.token_ids, experts)
        found = reference.log_probs([again], temperature=temperature)
        assert (found - record.log_probs).abs().max() < TOLERANCE


def test_greedy_tokens_and_log_probs_are_transformers(
    engine: VllmEngine, loop: asyncio.AbstractEventLoop, model: ModelSpec, reference: SequenceAdapter
) -> None:
    loop.run_until_complete(engine.prepare(model, None))
    request = asked(group(0, "1+1=", 1), group(1, LONG, 2), settings=replace(SETTINGS, temperature=0.0))
    for sample, prompt in zip(loop.run_until_complete(generated(engine, request)), ("1+1=", LONG), strict=True):
        ids = reference.encode(prompt).token_ids
        with torch.no_grad():
            found = reference.transformer.generate(ids[None], max_new_tokens=12, do_sample=False)[0, len(ids) :]
        assert tokens_of(sample).token_ids.tolist() == found.tolist()
        assert_agrees(reference, prompt, sample)


def test_log_probs_are_the_trainers_at_the_jobs_temperature(
    engine: VllmEngine, loop: asyncio.AbstractEventLoop, model: ModelSpec, reference: SequenceAdapter
) -> None:
    """Log-probs are of all tokens, though top-p draws from some."""
    loop.run_until_complete(engine.prepare(model, None))
    settings = replace(SETTINGS, temperature=0.7, top_p=0.8, routed_experts=True)
    request = asked(group(0, "1+1=", 5, 6, 7), group(1, LONG, *range(8)), settings=settings)
    samples = loop.run_until_complete(generated(engine, request))
    assert [(one.group, one.index, one.seed) for one in samples] == [
        *((0, place, 5 + place) for place in range(3)),
        *((1, place, place) for place in range(8)),
    ]
    for sample in samples:
        prompt = "1+1=" if sample.group == 0 else LONG
        assert_agrees(reference, prompt, sample, 0.7)
        record = tokens_of(sample)
        assert (sample.num_tokens, sample.prompt_tokens) == (len(record.token_ids), len(prompt))
        if reference.routing.num_layers:
            assert record.routed_experts is not None
            assert record.routed_experts.shape == (len(prompt) - 1 + len(record.token_ids), 2, 2)
        else:
            assert record.routed_experts is None


def test_tokens_have_the_models_frequencies(
    engine: VllmEngine, loop: asyncio.AbstractEventLoop, model: ModelSpec, reference: SequenceAdapter
) -> None:
    """The first of 2000 samples: within 5 standard deviations, and none that top-p leaves out."""
    loop.run_until_complete(engine.prepare(model, None))
    count, settings = 2000, SequenceSampling(max_tokens=1, temperature=0.8, top_p=0.9)
    samples = loop.run_until_complete(generated(engine, asked(group(0, "1+1=", *range(count)), settings=settings)))
    found = (
        torch.bincount(torch.cat([tokens_of(one).token_ids for one in samples]), minlength=reference.vocabulary_size)
        / count
    )
    with torch.no_grad():
        logits = reference.transformer(input_ids=reference.encode("1+1=").token_ids[None]).logits[0, -1]
    ordered, order = torch.softmax(logits / 0.8, 0).sort(descending=True)
    kept = ordered * (ordered.cumsum(0) - ordered < 0.9)
    expected = torch.zeros_like(found).scatter(0, order, kept / kept.sum())
    assert (found[expected == 0] == 0).all()
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt() + 1e-6).all()


def test_undrawn_tokens_count_in_log_probs_but_are_not_drawn(
    engine: VllmEngine, loop: asyncio.AbstractEventLoop, model: ModelSpec
) -> None:
    """Also where they are the likeliest by far. The engine comes first: it sets what vLLM reads when it is imported."""
    loop.run_until_complete(engine.prepare(model, None))
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    from services.rollout.engines.vllm.log_probs import TemperedSampler

    rows, none = 400, torch.empty(0)
    logits = torch.zeros(rows, 6)
    logits[:, [2, 5]] = 9.0
    for temperature, drawn in ((None, {0}), (0.5, {0, 1, 3, 4})):
        metadata = SamplingMetadata(
            temperature=None if temperature is None else torch.full((rows,), temperature),
            all_greedy=temperature is None,
            all_random=temperature is not None,
            top_p=None,
            top_k=None,
            generators={},
            max_num_logprobs=0,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=none,
            presence_penalties=none,
            repetition_penalties=none,
            output_token_ids=[[]] * rows,
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        )
        found = TemperedSampler([2, 5], CPU).forward(logits.clone(), metadata)
        tokens = found.sampled_token_ids.long()
        assert set(tokens.flatten().tolist()) == drawn
        expected = torch.log_softmax(logits / (temperature or 1.0), dim=-1).gather(1, tokens)
        assert torch.allclose(found.logprobs_tensors.logprobs[:, :1], expected)


def test_a_sample_depends_on_its_own_seed_only(
    engine: VllmEngine, loop: asyncio.AbstractEventLoop, model: ModelSpec
) -> None:
    loop.run_until_complete(engine.prepare(model, None))
    together = asked(group(0, "1+1=", 5, 6, 7), group(2, "a+b=", 9), group(3, "long?", 11))
    samples = {(one.group, one.index): one for one in loop.run_until_complete(generated(engine, together))}
    alone = loop.run_until_complete(generated(engine, asked(PromptGroup(0, "1+1=", (1,), (6,)))))
    assert tokens_of(alone[0]).token_ids.tolist() == tokens_of(samples[0, 1]).token_ids.tolist()
    assert alone[0].text == samples[0, 1].text
    assert len({one.text for one in samples.values() if one.group == 0}) > 1


def test_requests_share_batches_and_each_keeps_its_order(
    engine: VllmEngine, loop: asyncio.AbstractEventLoop, model: ModelSpec
) -> None:
    """The later and shorter one is done first."""
    done: list[str] = []

    async def one(name: str, request: GenerationRequest) -> list[tuple[int, int]]:
        found = await generated(engine, request)
        done.append(name)
        return [(sample.group, sample.index) for sample in found]

    async def both() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        await engine.prepare(model, None)
        long = asked(group(0, "1+1=", *range(9)), group(1, "longer?", 1), settings=SequenceSampling(400))
        first = asyncio.create_task(one("long", long))
        await asyncio.sleep(0.05)
        return await asyncio.gather(first, one("short", asked(group(5, "a", 1), settings=SequenceSampling(2))))

    first, second = loop.run_until_complete(both())
    assert first == [*((0, place) for place in range(9)), (1, 0)]
    assert second == [(5, 0)]
    assert done == ["short", "long"]


def test_stops(engine: VllmEngine, loop: asyncio.AbstractEventLoop, model: ModelSpec) -> None:
    loop.run_until_complete(engine.prepare(model, None))
    request = asked(group(0, "1+1=", *range(30, 38)), settings=replace(SETTINGS, max_tokens=60))
    samples = loop.run_until_complete(generated(engine, request))
    for sample in samples:
        ids = tokens_of(sample).token_ids.tolist()
        assert 1 not in ids[:-1]
        assert sample.stop_reason == ("stop" if ids[-1] == 1 else "length")
        assert sample.stop_reason == "stop" or len(ids) == 60
    assert {sample.stop_reason for sample in samples} == {"stop", "length"}
    longest = max(samples, key=lambda one: one.num_tokens)
    assert longest.text is not None
    mark = longest.text[10:12]
    settings = SequenceSampling(60, stop=(mark,))
    (stopped,) = loop.run_until_complete(generated(engine, asked(group(0, "1+1=", longest.seed), settings=settings)))
    assert (stopped.text, stopped.stop_reason) == (longest.text[: longest.text.index(mark) + 2], "stop")
    ids = tokens_of(stopped).token_ids.tolist()
    assert ids == tokens_of(longest).token_ids.tolist()[: len(ids)]


def test_the_folder_says_which_tokens_end_a_sequence(
    engine: VllmEngine, loop: asyncio.AbstractEventLoop, model: ModelSpec, tmp_path: Path
) -> None:
    """`generation_config.json`, which the configuration of the model may not agree with."""
    folder = shutil.copytree(model.path, tmp_path / "model")
    ends = [1, *range(10, 20)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    loop.run_until_complete(engine.prepare(ModelSpec(path=str(folder), dtype="float32"), None))
    request = asked(group(0, "1+1=", *range(30, 38)), settings=replace(SETTINGS, max_tokens=60))
    for sample in loop.run_until_complete(generated(engine, request)):
        ids = tokens_of(sample).token_ids.tolist()
        assert not set(ends) & set(ids[:-1])
        assert (ids[-1] in ends) == (sample.stop_reason == "stop")
        assert sample.stop_reason == "stop", "11 of 41 tokens end it"


def test_cancelled_work_stops_and_leaves_room(
    engine: VllmEngine, loop: asyncio.AbstractEventLoop, model: ModelSpec
) -> None:
    asked_for = 0

    def cancelled() -> bool:
        nonlocal asked_for
        asked_for += 1
        return asked_for > 3

    async def body() -> None:
        await engine.prepare(model, None)
        with pytest.raises(Cancelled):
            await anext(engine.generate(asked(group(0, "1+1=", 1), settings=SequenceSampling(1000)), cancelled))
        assert asked_for == 4
        left = engine.generate(asked(group(0, "1", 1), group(1, "2", 1), settings=SequenceSampling(500)), lambda: False)
        await anext(left)
        await left.aclose()
        assert await engine._run(engine.pulse.work("test"), lambda: engine._llm.has_unfinished_requests()) is False
        assert await generated(engine, asked(group(0, "1+1=", 1)))

    loop.run_until_complete(body())


def test_an_adapter_changes_what_is_written_and_is_verified(
    engine: VllmEngine, loop: asyncio.AbstractEventLoop, model: ModelSpec, reference: SequenceAdapter
) -> None:
    """Prompts are longer than a block of the cache: what vLLM keeps of them is dropped with the old weights."""
    request = asked(group(0, LONG, 5, 6))

    async def body() -> None:
        await engine.prepare(model, LORA)
        for sample in await generated(engine, request):
            assert_agrees(reference, LONG, sample)
        live = adapters.install_lora(reference.experts, LORA)
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            state = {name: torch.randn(value.shape, generator=generator) / 2 for name, value in live.items()}
            await engine.load_adapter(state)
            hashes = weights.tensor_hashes(state.items())
            assert await engine.verify(hashes) == weights.digest(hashes)
            adapters.load_adapter(reference.experts, state)
            for sample in await generated(engine, request):
                assert_agrees(reference, LONG, sample)
        for name in hashes:
            wrong = hashes | {name: hashes[name] ^ 1}
            with pytest.raises(DataLoss, match="do not match the hash"):
                await engine.verify(wrong)

    loop.run_until_complete(body())


def test_full_weights_are_received_in_place_and_the_next_job_gets_the_base_back(
    engine: VllmEngine, loop: asyncio.AbstractEventLoop, model: ModelSpec, reference: SequenceAdapter
) -> None:
    request = asked(group(0, LONG, 5, 6))
    parameters = weights.full_parameters(reference.experts)
    generator = torch.Generator().manual_seed(2)
    new = {name: value + torch.randn(value.shape, generator=generator) / 10 for name, value in parameters.items()}

    async def body() -> None:
        await engine.prepare(model, None)
        before = await generated(engine, request)
        held = {name: value.data_ptr() for name, value in engine._base().items()}
        await received(engine, new)
        hashes = weights.tensor_hashes(new.items())
        assert await engine.verify(hashes) == weights.digest(hashes)
        assert {name: value.data_ptr() for name, value in engine._base().items()} == held
        after = await generated(engine, request)
        assert tokens_of(after[0]).log_probs.tolist() != tokens_of(before[0]).log_probs.tolist()
        for name, value in parameters.items():
            value.copy_(new[name])
        for sample in after:
            assert_agrees(reference, LONG, sample)
        next(iter(engine._base().values())).view(-1)[3] += 1e-3
        with pytest.raises(DataLoss, match=r"1 of .* parameters do not match the hash"):
            await engine.verify(hashes)
        await engine.prepare(model, None)
        again = await generated(engine, request)
        assert tokens_of(again[0]).log_probs.tolist() == tokens_of(before[0]).log_probs.tolist()

    loop.run_until_complete(body())


async def received(engine: VllmEngine, state: dict[str, Tensor]) -> None:
    buckets = weights.make_buckets(weights.specs_of(state), 4096)
    recorder = Recorder()
    weights.send(recorder, buckets, filling(state))
    with pytest.raises(ValueError, match="every weight once"):
        await engine.receive(Sender(recorder.flats), buckets[:-1])
    await engine.receive(Sender(recorder.flats), buckets)


def test_random_weights_are_the_trainers(engine: VllmEngine, loop: asyncio.AbstractEventLoop, model: ModelSpec) -> None:
    """`model.load_format = "dummy"`."""
    spec = ModelSpec(path=model.path, dtype="float32", load_format="dummy")
    loop.run_until_complete(engine.prepare(spec, None))
    other = sequence_adapter_for(model.path).load(model.path, dtype=torch.float32, load_format="dummy")
    for sample in loop.run_until_complete(generated(engine, asked(group(0, "1+1=", 1, 2)))):
        assert_agrees(other, "1+1=", sample)


def test_what_does_not_fit_is_the_users_mistake(
    engine: VllmEngine, loop: asyncio.AbstractEventLoop, model: ModelSpec
) -> None:
    def refused(match: str, **changes: Any) -> None:
        settings = replace(SETTINGS, **changes)
        with pytest.raises(ValueError, match=match):
            loop.run_until_complete(generated(engine, asked(group(0, "1+1=", 1), settings=settings)))

    loop.run_until_complete(engine.prepare(model, None))
    refused(r"more than rollout\.sequence\.max_prompt_tokens = 3", max_prompt_tokens=3)
    refused(r"rollout\.sequence\.max_tokens = 5000 exceed the 4096 tokens", max_tokens=5000)
    refused(r"rollout\.sequence\.temperature = 0\.001", temperature=1e-3)
    with pytest.raises(ValueError, match=r"rollout\.compile"):
        loop.run_until_complete(engine.prepare(ModelSpec(path=model.path, dtype="float32", compile=True), None))
    flow = Path(__file__).parents[3] / "recipes/tiny/model"
    with pytest.raises(ValueError, match="start rollouts with --engine diffusers"):
        loop.run_until_complete(engine.prepare(ModelSpec(path=str(flow), dtype="float32"), None))
