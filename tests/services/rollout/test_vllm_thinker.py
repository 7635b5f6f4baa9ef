"""Qwen3-Omni's Thinker in the vLLM engine, on the CPU: questions with media against the trainer's own forward."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flowfleet.models.registry import sequence_adapter_for
from flowfleet.models.sequences.adapter import SequenceAdapter, Tokens
from flowfleet.models.sequences.prompts import PromptMedia
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.weights import lora as adapters
from flowfleet.weights import weights
from recipes.tiny_thinker.model import QUESTION, save_random
from services.rollout.engines.base import GeneratedSample, GenerationRequest, PromptGroup, SequenceSampling
from services.rollout.engines.vllm import parameters
from services.rollout.engines.vllm.engine import VllmEngine
from tests.e2e.matrix.texts import as_whole
from tests.services.rollout.test_transformers_engine import asked, generated, tokens_of
from tests.services.rollout.test_vllm import LORA, TOLERANCE, received

pytestmark = pytest.mark.long

RANDOM = np.random.default_rng(0)
PICTURE = PromptMedia("picture", RANDOM.integers(0, 255, (64, 96, 3), np.uint8))
SMALL = PromptMedia("picture", RANDOM.integers(0, 255, (32, 32, 3), np.uint8))
SOUND = PromptMedia("sound", RANDOM.standard_normal(16_000).astype(np.float32))
FILM = PromptMedia("film", RANDOM.integers(0, 255, (6, 32, 64, 3), np.uint8), 2.0)
MEDIA = ((), (PICTURE,), (PICTURE, SMALL), (SOUND,), (FILM,), (SOUND, FILM, PICTURE))
SETTINGS = SequenceSampling(max_tokens=12, temperature=0.7, routed_experts=True)


@pytest.fixture(scope="module", params=["thinker", "whole"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Thinker by itself, and in the folder of a whole Qwen3-Omni."""
    path = tmp_path_factory.mktemp("models")
    save_random(path)
    return path if request.param == "thinker" else as_whole(path)


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    made = VllmEngine(torch.device("cpu"), max_batch=8, threads=1)
    yield made
    asyncio.run(made.close())


@pytest.fixture
def reference(folder: Path) -> SequenceAdapter:
    return sequence_adapter_for(folder).load(folder, dtype=torch.float32)


def questions(*media: tuple[PromptMedia, ...]) -> GenerationRequest:
    groups = tuple(PromptGroup(number, QUESTION, (0, 1), (5, 6), inputs=own) for number, own in enumerate(media))
    return replace(asked(settings=SETTINGS), groups=groups)


@torch.no_grad()
def assert_agrees(reference: SequenceAdapter, media: tuple[PromptMedia, ...], sample: GeneratedSample) -> None:
    record, prompt = tokens_of(sample), reference.encode(QUESTION, media)
    assert record.routed_experts is not None
    assert sample.prompt_tokens == len(prompt.token_ids)
    assert not reference.undrawn_ids & set(record.token_ids.tolist())
    for experts in (None, record.routed_experts):
        found = reference.log_probs([Tokens(prompt, record.token_ids, experts)], temperature=SETTINGS.temperature)
        assert (found - record.log_probs).abs().max() < TOLERANCE


def spec_of(folder: Path) -> ModelSpec:
    return ModelSpec(path=str(folder), dtype="float32")


async def test_questions_with_media_have_the_trainers_log_probs(
    engine: VllmEngine, folder: Path, reference: SequenceAdapter
) -> None:
    await engine.prepare(spec_of(folder), None)
    samples = await generated(engine, questions(*MEDIA))
    assert len(samples) == 2 * len(MEDIA)
    for sample in samples:
        assert_agrees(reference, MEDIA[sample.group], sample)


@pytest.mark.parametrize("mode", ["lora", "full"])
async def test_new_weights_change_what_is_seen(
    engine: VllmEngine, folder: Path, reference: SequenceAdapter, mode: str
) -> None:
    """The encoders change too: what vLLM keeps of a picture under the old weights is dropped."""
    lora = LoraSpec(rank=LORA.rank, alpha=LORA.alpha, target_modules=LORA.target_modules) if mode == "lora" else None
    generator = torch.Generator().manual_seed(1)
    await engine.prepare(spec_of(folder), lora)
    before = await generated(engine, questions((PICTURE,)))
    if lora is not None:
        live = adapters.install_lora(reference.experts, lora)
        state = {name: torch.randn(value.shape, generator=generator) for name, value in live.items()}
        await engine.load_adapter(state)
        adapters.load_adapter(reference.experts, state)
    else:
        own = weights.full_parameters(reference.experts)
        state = {name: value + torch.randn(value.shape, generator=generator) / 10 for name, value in own.items()}
        await received(engine, state)
        for name, value in own.items():
            value.copy_(state[name])
    hashes = weights.tensor_hashes(state.items())
    assert await engine.verify(hashes) == weights.digest(hashes)
    after = await generated(engine, questions((PICTURE,)))
    assert tokens_of(after[0]).log_probs.tolist() != tokens_of(before[0]).log_probs.tolist()
    for sample in after:
        assert_agrees(reference, (PICTURE,), sample)


def test_weights_have_the_names_of_the_transformers_that_is_there(engine: VllmEngine, folder: Path) -> None:
    """5.17's Thinker holds its encoders next to the language model, later ones in one model with it."""
    asyncio.run(engine.prepare(spec_of(folder), None))
    from services.rollout.engines.vllm.thinker import renames

    thinker = torch.nn.Module()
    thinker.model = torch.nn.Module()
    ours = ["language_model.model.norm.weight", "language_model.lm_head.weight", "visual.x", "audio_tower.x"]
    for names in (
        ["model.norm.weight", "lm_head.weight", "visual.x", "audio_tower.x"],
        ["model.language_model.norm.weight", "lm_head.weight", "model.visual.x", "model.audio_tower.x"],
    ):
        assert [parameters.transformers_name(name, renames(thinker)) for name in ours] == names
        assert [parameters.vllm_name(name, renames(thinker)) for name in names] == ours
        thinker.model.language_model = torch.nn.Module()
