"""Log-probs of tokens: packed, alone, against a float64 log-softmax of the model's own logits; replayed experts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowfleet.models.registry import adapter_for, family_of, sequence_adapter_for
from flowfleet.models.sequences import token_log_probs
from flowfleet.models.sequences.adapter import SequenceAdapter, Tokens
from flowfleet.models.sequences.prompts import EncodedPrompt
from tests.tiny_models.text import VOCABULARY, save_text_model


@pytest.fixture(scope="module", params=["dense", "tied", "experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def adapter(folder: Path) -> SequenceAdapter:
    return sequence_adapter_for(folder).load(folder, dtype=torch.float32, components=("transformer",))


def drawn(lengths: list[tuple[int, int]]) -> list[Tokens]:
    generator = torch.Generator().manual_seed(1)

    def ids(number: int) -> Tensor:
        return torch.randint(2, VOCABULARY, (number,), generator=generator)

    return [Tokens(EncodedPrompt(ids(prompt)), ids(written)) for prompt, written in lengths]


def alone(adapter: SequenceAdapter, sequences: list[Tokens], temperature: float) -> Tensor:
    return torch.cat([adapter.log_probs([item], temperature=temperature) for item in sequences])


def test_a_folder_of_transformers_is_known_without_torch_by_its_class(folder: Path) -> None:
    assert family_of(folder).writes_tokens
    with pytest.raises(ValueError, match="writes text"):
        adapter_for(folder)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_a_float64_softmax(adapter: SequenceAdapter, temperature: float) -> None:
    (item,) = drawn([(5, 7)])
    ids = torch.cat([item.prompt.token_ids, item.token_ids])
    logits = adapter.transformer(input_ids=ids[None]).logits[0, 4:-1].double() / temperature
    expected = logits.log_softmax(-1).gather(-1, item.token_ids[:, None])[:, 0]
    torch.testing.assert_close(adapter.log_probs([item], temperature=temperature).double(), expected, atol=1e-5, rtol=0)


def test_packed_sequences_have_the_log_probs_of_each_alone(adapter: SequenceAdapter) -> None:
    sequences = drawn([(5, 7), (3, 9), (1, 1), (8, 4), (1, 6)])
    packed = adapter.log_probs(sequences, temperature=0.8)
    torch.testing.assert_close(packed, alone(adapter, sequences, 0.8), atol=1e-5, rtol=0)
    assert torch.equal(adapter.log_probs(sequences, temperature=0.8), packed)


def test_no_sequence_of_a_row_sees_another(adapter: SequenceAdapter) -> None:
    first, second, third = drawn([(4, 6), (3, 5), (4, 6)])
    before = adapter.log_probs([first, second], temperature=1.0)
    after = adapter.log_probs([third, second], temperature=1.0)
    torch.testing.assert_close(before[6:], after[6:], atol=1e-5, rtol=0)
    assert not torch.allclose(before[:6], after[:6], atol=1e-2)


def test_chunks_change_neither_values_nor_gradients(adapter: SequenceAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = drawn([(5, 7), (3, 9)])
    results = []
    for elements in (token_log_probs.CHUNK_ELEMENTS, 3 * 48):
        monkeypatch.setattr(token_log_probs, "CHUNK_ELEMENTS", elements)
        weight = adapter.transformer.lm_head.weight.requires_grad_()
        values = adapter.log_probs(sequences, temperature=1.0)
        results.append((values.detach(), torch.autograd.grad((values * torch.arange(16)).sum(), weight)[0]))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, atol=1e-5 * float(whole.abs().max()), rtol=0)


def test_replayed_experts_are_taken_again(adapter: SequenceAdapter, folder: Path) -> None:
    if adapter.routing.num_layers == 0:
        (item,) = drawn([(2, 2)])
        odd = Tokens(item.prompt, item.token_ids, torch.zeros(3, 2, 2, dtype=torch.uint8))
        with pytest.raises(ValueError, match="no experts"):
            adapter.log_probs([odd], temperature=1.0)
        return
    sequences = drawn([(5, 7), (3, 4)])
    with adapter.routing.recording() as record:
        own = adapter.log_probs(sequences, temperature=1.0)
    routed = torch.stack([torch.cat(layer) for layer in record], 1).to(torch.uint8)
    assert routed.shape == (11 + 6, 2, 2)
    parts = torch.split(routed, [11, 6])
    replayed = [Tokens(s.prompt, s.token_ids, part) for s, part in zip(sequences, parts, strict=True)]
    torch.testing.assert_close(adapter.log_probs(replayed, temperature=1.0), own, atol=1e-6, rtol=0)
    others = [Tokens(s.prompt, s.token_ids, (part + 1) % 8) for s, part in zip(sequences, parts, strict=True)]
    with adapter.routing.recording() as record:
        moved = adapter.log_probs(others, temperature=1.0)
    assert not torch.allclose(moved, own, atol=1e-3)
    assert torch.equal(adapter.log_probs(sequences, temperature=1.0), own), "the next forward routes by itself"
    with pytest.raises(ValueError, match="some have none"):
        adapter.log_probs([replayed[0], sequences[1]], temperature=1.0)
    odd = Tokens(sequences[0].prompt, sequences[0].token_ids, torch.full_like(parts[0], 9))
    with pytest.raises(ValueError, match="names expert 9 of 8"):
        adapter.log_probs([odd], temperature=1.0)
