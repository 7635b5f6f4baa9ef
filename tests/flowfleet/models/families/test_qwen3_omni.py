"""Qwen3-Omni's Thinker against transformers' own forward: positions, media of all kinds, packing, and sampling."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flowfleet.data.sequences import PromptBlob, TokenTrajectory
from flowfleet.models.families.qwen3_omni import Qwen3OmniThinkerAdapter
from flowfleet.models.registry import family_of, sequence_adapter_for
from flowfleet.models.sequences.adapter import Tokens
from flowfleet.models.sequences.prompts import EncodedPrompt, PromptMedia
from flowfleet.models.sequences.question_media import frames_shown
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.weights import lora
from recipes.tiny_thinker import model as tiny
from services.rollout.engines.base import GenerationRequest, Noise, PromptGroup, SequenceSampling
from services.rollout.engines.transformers import TransformersEngine
from services.rollout.sampling.requests import NO_SAMPLING

NOISE = np.random.default_rng(0)
PICTURE = PromptMedia("picture", np.asarray(tiny.picture("red", random.Random(0))))
WIDE = PromptMedia("picture", NOISE.integers(0, 256, (32, 64, 3), np.uint8))
SOUND = PromptMedia("sound", NOISE.normal(size=16_000).astype(np.float32))
SHORT = PromptMedia("sound", NOISE.normal(size=5_000).astype(np.float32))
FILM = PromptMedia("film", NOISE.integers(0, 256, (16, 32, 32, 3), np.uint8), rate=8.0)
ANSWER = torch.tensor([22, 13, 2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("thinker")
    tiny.save_random(path)
    return path


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Qwen3OmniThinkerAdapter:
    found = sequence_adapter_for(folder).load(folder, dtype=torch.float32)
    assert isinstance(found, Qwen3OmniThinkerAdapter)
    return found


def log_probs_by_transformers(
    adapter: Qwen3OmniThinkerAdapter, prompt: EncodedPrompt, answer: torch.Tensor
) -> torch.Tensor:
    """Computes them by the model's usual forward, which finds the positions itself."""
    ids = torch.cat([prompt.token_ids, answer])[None]
    inputs = dict(prompt.inputs)
    with torch.no_grad():
        logits = adapter.transformer(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits
    first = len(prompt.token_ids) - 1
    spread = torch.log_softmax(logits[0, first:-1].double(), dim=-1)
    return spread.gather(-1, answer[:, None])[:, 0].float()


QUESTIONS: list[tuple[PromptMedia, ...]] = [
    (),
    (PICTURE,),
    (SOUND,),
    (FILM,),
    (PICTURE, WIDE),
    (SHORT, PICTURE, FILM, SOUND),
]


def test_the_family_is_known_without_torch(folder: Path) -> None:
    assert family_of(folder).takes_media
    assert family_of(folder).writes_tokens


@pytest.mark.parametrize("media", QUESTIONS, ids=lambda media: "+".join(one.kind for one in media) or "text")
def test_log_probs_are_those_of_transformers_own_forward(
    adapter: Qwen3OmniThinkerAdapter, media: tuple[PromptMedia, ...]
) -> None:
    prompt = adapter.encode(tiny.QUESTION, media)
    with torch.no_grad():
        ours = adapter.log_probs([Tokens(prompt, ANSWER)], temperature=1.0)
    torch.testing.assert_close(ours, log_probs_by_transformers(adapter, prompt, ANSWER), atol=2e-6, rtol=1e-5)


def test_packed_questions_do_not_see_one_another(adapter: Qwen3OmniThinkerAdapter) -> None:
    rows = [Tokens(adapter.encode(tiny.QUESTION, media), ANSWER) for media in QUESTIONS]
    with torch.no_grad():
        packed = adapter.log_probs(rows, temperature=0.7)
        alone = torch.cat([adapter.log_probs([row], temperature=0.7) for row in rows])
    torch.testing.assert_close(packed, alone, atol=5e-6, rtol=1e-5)
    changed = [Tokens(adapter.encode(tiny.QUESTION, (WIDE,)), ANSWER), *rows[1:]]
    with torch.no_grad():
        after = adapter.log_probs(changed, temperature=0.7)
    torch.testing.assert_close(after[3:], packed[3:], atol=5e-6, rtol=1e-5)


def test_a_picture_a_sound_and_a_film_change_the_answer(adapter: Qwen3OmniThinkerAdapter) -> None:
    found = []
    for media in [(), *((one,) for one in (PICTURE, WIDE, SOUND, SHORT, FILM))]:
        with torch.no_grad():
            found.append(adapter.log_probs([Tokens(adapter.encode("what ?", media), ANSWER)], temperature=1.0).tolist())
    assert len({tuple(one) for one in found}) == len(found)


def test_a_still_film_has_the_patches_of_its_picture(adapter: Qwen3OmniThinkerAdapter) -> None:
    """Two equal frames are what transformers makes of a picture."""
    frames = np.repeat(PICTURE.content[None], 8, axis=0)
    film = adapter.encode("what ?", [PromptMedia("film", frames, rate=2.0)])
    still = adapter.encode("what ?", [PICTURE])
    assert film.inputs["video_grid_thw"].tolist() == [[4, *still.inputs["image_grid_thw"][0, 1:].tolist()]]
    patches = film.inputs["pixel_values_videos"].view(4, *still.inputs["pixel_values"].shape)
    for part in patches:
        torch.testing.assert_close(part, still.inputs["pixel_values"], atol=0, rtol=0)


def test_frames_of_a_film_keep_their_order_in_time(adapter: Qwen3OmniThinkerAdapter) -> None:
    dark, light = np.zeros((32, 32, 3), np.uint8), np.full((32, 32, 3), 255, np.uint8)
    film = adapter.encode("what ?", [PromptMedia("film", np.stack([dark, light]), rate=2.0)])
    patches = film.inputs["pixel_values_videos"].view(-1, 3, 2, 64)
    assert float(patches[:, :, 0].max()) < float(patches[:, :, 1].min())


@pytest.mark.parametrize(
    ("count", "rate", "expected"),
    [(16, 8.0, [0, 5, 10, 15]), (1, 2.0, [0, 0]), (3, 2.0, [0, 1, 2, 2]), (4, 0.0, [0, 1, 2, 3]), (2, 30.0, [0, 1])],
)
def test_frames_that_are_shown(count: int, rate: float, expected: list[int]) -> None:
    assert frames_shown(count, rate, 2) == expected


def test_a_prompt_with_placeholders_of_its_own_is_refused(adapter: Qwen3OmniThinkerAdapter) -> None:
    with pytest.raises(ValueError, match=r"must not contain <\|image_pad\|>"):
        adapter.encode("what is <|image_pad|> ?", [PICTURE])


def test_the_default_adapter_is_of_the_language_model_alone(folder: Path) -> None:
    own = Qwen3OmniThinkerAdapter.load(folder, dtype=torch.float32, components=("transformer",))
    spec = LoraSpec(rank=2, alpha=4, target_modules=own.lora_targets)
    names = lora.install_lora(own.experts, spec)
    assert len(names) == 2 * 2 * len(own.lora_targets)
    inside = "language_model." if hasattr(own.transformer.model, "language_model") else ""  # from 5.21 on
    assert all(name.startswith(f"model.model.{inside}layers.") for name in names)


class _Flat(nn.Module):
    """A Thinker as before transformers 5.21: media go into the whole model, which also gives out logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = nn.Linear(1, 1), nn.Linear(2, 5)
        self.given: dict[str, Any] = {}

    def forward(self, **given: Any) -> Any:
        self.given = given
        if "broken" in given:
            raise RuntimeError("broken")
        return SimpleNamespace(logits=self.lm_head(given["pixel_values"]))


def test_before_transformers_5_21_media_go_through_the_whole_model_without_its_output_layer(
    adapter: Qwen3OmniThinkerAdapter,
) -> None:
    flat, pixels = _Flat(), torch.randn(1, 3, 2)
    head = flat.lm_head
    assert torch.equal(adapter.hidden_states(flat, {"pixel_values": pixels}), pixels)
    assert flat.given["use_cache"] is False
    with pytest.raises(RuntimeError, match="broken"):
        adapter.hidden_states(flat, {"broken": True})
    assert flat.lm_head is head


@pytest.fixture
async def engine() -> AsyncIterator[TransformersEngine]:
    made = TransformersEngine(torch.device("cpu"), max_batch=8, threads=1)
    yield made
    await made.close()


async def test_the_engine_samples_questions_with_media(
    engine: TransformersEngine, adapter: Qwen3OmniThinkerAdapter, folder: Path
) -> None:
    groups = tuple(
        PromptGroup(number, tiny.QUESTION, (0, 1, 2), (5, 6, 7), inputs=media) for number, media in enumerate(QUESTIONS)
    )
    sampling = SequenceSampling(max_tokens=6, routed_experts=True)
    request = GenerationRequest(groups, NO_SAMPLING, Noise(), "tokens", sequence=sampling)
    await engine.prepare(ModelSpec(path=str(folder), dtype="float32"), None)
    async for batch in engine.generate(request, lambda: False):
        for sample in batch.samples:
            prompt = batch.embeds[sample.group]
            assert isinstance(prompt, EncodedPrompt)
            assert isinstance(sample.record, TokenTrajectory)
            again = PromptBlob.from_bytes(PromptBlob.of(prompt).to_bytes()).encoded()
            row = Tokens(again, sample.record.token_ids, sample.record.routed_experts)
            with torch.no_grad():
                assert torch.equal(adapter.log_probs([row], temperature=1.0), sample.record.log_probs)
            draws = torch.rand(6, generator=torch.Generator().manual_seed(sample.seed), dtype=torch.float64)
            for step, token in enumerate(sample.record.token_ids.tolist()):
                sums = _distribution(adapter, prompt, sample.record.token_ids[:step]).cumsum(-1)
                assert token == int(torch.searchsorted(sums, draws[step] * sums[-1], right=True))


def _distribution(adapter: Qwen3OmniThinkerAdapter, prompt: EncodedPrompt, written: torch.Tensor) -> torch.Tensor:
    """(V,) float64 of the next token, without keys and values."""
    adapter.routing.replay([], [])
    inputs = adapter.model_inputs([Tokens(prompt, torch.cat([written, ANSWER[:1]]))])
    with torch.no_grad():
        found = torch.softmax(adapter.transformer(**inputs).logits[0, -1].double(), dim=-1)
    found[sorted(adapter.undrawn_ids)] = 0
    return found
