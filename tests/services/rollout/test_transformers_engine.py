"""The transformers engine: tokens against transformers' own forward, seeds, stops, records, adapters and weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowfleet.data.sequences import TokenTrajectory
from flowfleet.errors import DataLoss
from flowfleet.models.sequences.adapter import SequenceAdapter, Tokens
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.weights import lora as adapters
from flowfleet.weights import weights
from services.rollout.engines.base import (
    Cancelled,
    GeneratedSample,
    GenerationRequest,
    Noise,
    PromptGroup,
    RolloutEngine,
    SequenceSampling,
)
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.engines.tokens import choose
from services.rollout.engines.transformers import TransformersEngine
from services.rollout.sampling.requests import NO_SAMPLING
from tests.tiny_models.text import save_text_model

LORA = LoraSpec(rank=2, alpha=4, target_modules=["q_proj", "v_proj"])
SETTINGS = SequenceSampling(max_tokens=12)


@pytest.fixture(scope="module", params=["dense", "experts"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = save_text_model(tmp_path_factory.mktemp(request.param), request.param)
    return ModelSpec(path=str(folder), dtype="float32")


@pytest.fixture
async def engine() -> AsyncIterator[TransformersEngine]:
    made = TransformersEngine(torch.device("cpu"), max_batch=8, threads=1)
    yield made
    await made.close()


def group(number: int, prompt: str, *seeds: int) -> PromptGroup:
    return PromptGroup(number, prompt, tuple(range(len(seeds))), seeds)


def asked(*groups: PromptGroup, settings: SequenceSampling = SETTINGS) -> GenerationRequest:
    return GenerationRequest(groups, NO_SAMPLING, Noise(), "tokens", sequence=settings)


async def generated(engine: RolloutEngine, request: GenerationRequest) -> list[GeneratedSample]:
    return [sample async for batch in engine.generate(request, lambda: False) for sample in batch.samples]


async def sampled(engine: TransformersEngine, model: ModelSpec, request: GenerationRequest) -> list[GeneratedSample]:
    await engine.prepare(model, None)
    return await generated(engine, request)


def tokens_of(sample: GeneratedSample) -> TokenTrajectory:
    assert isinstance(sample.record, TokenTrajectory)
    return sample.record


def adapter_of(engine: TransformersEngine) -> SequenceAdapter:
    assert engine._adapter is not None
    return engine._adapter


async def test_every_token_is_drawn_from_the_models_own_distribution(
    engine: TransformersEngine, model: ModelSpec
) -> None:
    """Token by token without keys and values, through transformers' own forward."""
    settings = replace(SETTINGS, temperature=0.8, top_p=0.9)
    request = asked(group(0, "1+1=", 5, 6), group(1, "7+2=", 7), settings=settings)
    samples = await sampled(engine, model, request)
    adapter = adapter_of(engine)
    assert len({sample.text for sample in samples}) > 1
    for sample in samples:
        prompt = adapter.encode("1+1=" if sample.group == 0 else "7+2=").token_ids
        draws = torch.rand(12, generator=torch.Generator().manual_seed(sample.seed), dtype=torch.float64)
        row, found = prompt, tokens_of(sample).token_ids
        for step, token in enumerate(found.tolist()):
            with torch.no_grad():
                logits = adapter.transformer(input_ids=row[None]).logits[0, -1]
            probabilities = torch.softmax(logits.double() / 0.8, dim=-1)
            order = probabilities.argsort(descending=True)
            kept, mass = set(), 0.0
            for candidate in order.tolist():
                kept.add(candidate)
                mass += float(probabilities[candidate])
                if mass >= 0.9:
                    break
            at, expected = float(draws[step]) * mass, -1
            for candidate in sorted(kept):
                at -= float(probabilities[candidate])
                expected = candidate
                if at < 0:
                    break
            assert token == expected
            row = torch.cat([row, torch.tensor([token])])
        assert sample.num_tokens == len(found)
        assert sample.prompt_tokens == 4


async def test_log_probs_are_the_trainers_bit_for_bit(engine: TransformersEngine, model: ModelSpec) -> None:
    settings = replace(SETTINGS, temperature=0.7, top_p=0.8, routed_experts=True)
    samples = await sampled(engine, model, asked(group(0, "1+1=", 5, 6, 7), settings=settings))
    adapter = adapter_of(engine)
    is_mixture = adapter.routing.num_layers > 0
    for sample in samples:
        record = tokens_of(sample)
        again = Tokens(adapter.encode("1+1="), record.token_ids, record.routed_experts)
        found = adapter.log_probs([again], temperature=0.7)
        assert torch.equal(found.detach(), record.log_probs)
        assert (record.routed_experts is not None) == is_mixture
        if record.routed_experts is not None:
            assert record.routed_experts.shape == (3 + len(record.token_ids), 2, 2)


async def test_a_router_of_sigmoids_is_sampled_without_its_experts_alone(
    engine: TransformersEngine, model: ModelSpec
) -> None:
    await engine.prepare(model, None)
    routers = [module for module in adapter_of(engine).transformer.modules() if hasattr(module, "norm_topk_prob")]
    for router in routers:
        router.forward = by_sigmoid(router.forward)
    (sample,) = await generated(engine, asked(group(0, "1+1=", 5)))
    assert tokens_of(sample).routed_experts is None
    if any(type(router).__name__ == "Qwen3MoeTopKRouter" for router in routers):
        with pytest.raises(ValueError, match="Qwen3MoeTopKRouter does not score"):
            await generated(engine, asked(group(0, "1+1=", 5), settings=replace(SETTINGS, routed_experts=True)))


def by_sigmoid(forward: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def run(hidden: Tensor) -> tuple[Tensor, ...]:
        logits, _, indices = forward(hidden)
        return logits, logits.sigmoid().gather(-1, indices), indices

    return run


async def test_a_sample_depends_on_its_own_seed_only(engine: TransformersEngine, model: ModelSpec) -> None:
    together = asked(group(0, "1+1=", 5, 6, 7), group(2, "a+b=", 9), group(3, "long?", 11))
    samples = {(one.group, one.index): one for one in await sampled(engine, model, together)}
    again = await generated(engine, together)
    assert [tokens_of(one).log_probs.tolist() for one in again] == [
        tokens_of(one).log_probs.tolist() for one in samples.values()
    ]
    alone = await generated(engine, asked(PromptGroup(0, "1+1=", (1,), (6,))))
    assert torch.equal(tokens_of(alone[0]).token_ids, tokens_of(samples[0, 1]).token_ids)
    assert torch.equal(tokens_of(alone[0]).log_probs, tokens_of(samples[0, 1]).log_probs)
    assert alone[0].text == samples[0, 1].text


async def test_batches_are_cut_and_keep_the_order(engine: TransformersEngine, model: ModelSpec) -> None:
    await engine.prepare(model, None)
    request = asked(group(0, "1+1=", *range(9)), group(1, "longer?", 1), group(2, "short?", 1, 2))
    batches = [batch async for batch in engine.generate(request, lambda: False)]
    assert [sorted(batch.embeds) for batch in batches] == [[0], [0], [1], [2]]
    assert sum(batch.prompts["encoder"] for batch in batches) == 3
    found = [[(one.group, one.index) for one in batch.samples] for batch in batches]
    assert [len(batch) for batch in found] == [8, 1, 1, 2]
    assert [place for batch in found for place in batch] == [*((0, i) for i in range(9)), (1, 0), (2, 0), (2, 1)]


async def test_stops(engine: TransformersEngine, model: ModelSpec) -> None:
    request = asked(group(0, "1+1=", *range(30, 38)), settings=replace(SETTINGS, max_tokens=60))
    samples = await sampled(engine, model, request)
    for sample in samples:
        ids = tokens_of(sample).token_ids.tolist()
        assert 1 not in ids[:-1]
        assert sample.stop_reason == ("stop" if ids[-1] == 1 else "length")
        assert sample.stop_reason == "stop" or len(ids) == 60
    assert {sample.stop_reason for sample in samples} == {"stop", "length"}
    longest = max(samples, key=lambda one: one.num_tokens)
    assert longest.text is not None
    mark = longest.text[10:12]
    stopped = await generated(
        engine, asked(group(0, "1+1=", longest.seed), settings=SequenceSampling(60, stop=(mark,)))
    )
    text = longest.text[: longest.text.index(mark) + 2]
    assert (stopped[0].text, stopped[0].stop_reason) == (text, "stop")
    ids = tokens_of(stopped[0]).token_ids.tolist()
    assert ids == tokens_of(longest).token_ids.tolist()[: len(ids)]


async def test_temperature_0_takes_the_likeliest(engine: TransformersEngine, model: ModelSpec) -> None:
    request = replace(asked(group(0, "1+1=", 1, 2), settings=replace(SETTINGS, temperature=0.0)), record="none")
    first, second = await sampled(engine, model, request)
    assert first.record is None
    assert first.text == second.text
    with torch.no_grad():
        ids = adapter_of(engine).transformer.generate(
            adapter_of(engine).encode("1+1=").token_ids[None], max_new_tokens=12, do_sample=False
        )
    assert adapter_of(engine).text(ids[0, 4:]) == first.text


def test_tokens_of_no_probability_are_never_drawn() -> None:
    logits = torch.tensor([[0.0, -1e9, 1.0, -1e9]])
    for draw in (0.0, 0.25, 0.5, 0.999999999, 1 - 2**-53):
        assert choose(logits, torch.tensor([draw], dtype=torch.float64), 1.0, 1.0).item() in (0, 2)
        assert choose(logits, torch.tensor([draw], dtype=torch.float64), 1.0, 0.5).item() == 2


def test_draws_have_the_models_frequencies() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    draws = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    found = choose(logits.expand(10_000, 3), draws, 1.0, 1.0)
    frequencies = torch.bincount(found, minlength=3) / 10_000
    assert frequencies.tolist() == pytest.approx(torch.softmax(logits[0], 0).tolist(), abs=2e-4)


async def test_cancelled_work_stops_at_the_next_token(engine: TransformersEngine, model: ModelSpec) -> None:
    asked_for = 0

    def cancelled() -> bool:
        nonlocal asked_for
        asked_for += 1
        return asked_for > 3

    await engine.prepare(model, None)
    with pytest.raises(Cancelled):
        assert not [batch async for batch in engine.generate(asked(group(0, "1+1=", 1)), cancelled)]
    assert asked_for == 4


async def test_an_adapter_changes_what_is_written_and_is_verified(engine: TransformersEngine, model: ModelSpec) -> None:
    request = asked(group(0, "1+1=", 5))
    await engine.prepare(model, LORA)
    before = await generated(engine, request)
    state = {
        name: torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        for name, value in adapters.named_adapter_parameters(adapter_of(engine).experts).items()
    }
    assert all(name.startswith("model.model.layers.") for name in state)
    await engine.load_adapter(state)
    hashes = weights.tensor_hashes(state.items())
    assert await engine.verify(hashes)
    after = await generated(engine, request)
    assert tokens_of(before[0]).log_probs.tolist() != tokens_of(after[0]).log_probs.tolist()
    wrong = dict(hashes)
    wrong[next(iter(wrong))] ^= 1
    with pytest.raises(DataLoss, match="do not match the hash"):
        await engine.verify(wrong)


async def test_what_does_not_fit_is_the_users_mistake(engine: TransformersEngine, model: ModelSpec) -> None:
    settings = replace(SETTINGS, max_prompt_tokens=3)
    with pytest.raises(ValueError, match=r"4 tokens, more than rollout\.sequence\.max_prompt_tokens = 3"):
        await sampled(engine, model, asked(group(0, "1+1=", 1), settings=settings))
    with pytest.raises(ValueError, match=r"rollout\.compile"):
        await engine.prepare(ModelSpec(path=model.path, dtype="float32", compile=True), None)
    other = DiffusersEngine(torch.device("cpu"), max_batch=8, threads=1)
    with pytest.raises(ValueError, match="start rollouts with --engine transformers"):
        await other.prepare(model, None)
    await other.close()


async def test_a_flow_is_sampled_by_another_engine(engine: TransformersEngine) -> None:
    flow = Path(__file__).parents[3] / "recipes/tiny/model"
    with pytest.raises(ValueError, match="start rollouts with --engine diffusers"):
        await engine.prepare(ModelSpec(path=str(flow), dtype="float32"), None)
