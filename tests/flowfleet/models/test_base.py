"""Prompt embeds, seeded noise, and the choice of an adapter."""

import json
import sys
from pathlib import Path

import pytest
import torch

from flowfleet.models.base import ModelAdapter, seeded_noise
from flowfleet.models.embeds import PromptEmbeds, concat_embeds, pad_embeds
from flowfleet.models.families.qwen_image import QwenImageAdapter
from flowfleet.models.registry import FAMILIES, adapter_for, sequence_adapter_for
from flowfleet.models.sequences.adapter import SequenceAdapter


def prompts(*lengths: int) -> PromptEmbeds:
    """Rows of the given numbers of tokens, each token's vector filled with 1 + its row."""
    width = max(lengths)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    embeds = mask[..., None] * torch.arange(1.0, len(lengths) + 1)[:, None, None]
    return PromptEmbeds(embeds.expand(-1, -1, 3), mask)


def test_padding_is_noticed() -> None:
    assert prompts(2, 3).has_padding
    assert not prompts(3, 3).has_padding
    for both in (prompts(2, 3), prompts(3, 3)):
        assert both.repeat(4).embeds.shape == (8, 3, 3)
        assert both.repeat(4).has_padding == both.to("cpu", torch.float64).has_padding == both.has_padding


def test_repeat_keeps_a_prompts_samples_together_and_select_takes_rows() -> None:
    both = prompts(2, 3)
    assert both.repeat(2).mask.sum(1).tolist() == [2, 2, 3, 3]
    assert both.select([1, 0, 1]).embeds[:, 0, 0].tolist() == [2.0, 1.0, 2.0]
    assert not both.select(torch.tensor([1])).has_padding


def test_padding_and_concatenation_add_zero_vectors_on_the_right() -> None:
    wide = pad_embeds(prompts(2), 4)
    assert wide.mask.tolist() == [[True, True, False, False]]
    assert wide.embeds[0, :, 0].tolist() == [1.0, 1.0, 0.0, 0.0]
    joined = concat_embeds([prompts(2), prompts(4, 1)])
    assert joined.mask.sum(1).tolist() == [2, 4, 1]
    assert joined.embeds.shape == (3, 4, 3)
    with pytest.raises(ValueError, match="4 tokens do not fit"):
        pad_embeds(prompts(4), 3)


def test_embeds_that_do_not_fit_their_mask_are_refused() -> None:
    with pytest.raises(ValueError, match="bool mask"):
        PromptEmbeds(torch.zeros(2, 3, 4), torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="bool mask"):
        PromptEmbeds(torch.zeros(2, 3, 4), torch.ones(2, 3))


def test_seeded_noise_depends_on_the_seed_alone() -> None:
    seeds = [7, 2**63 - 1, 0, 7]
    noise = seeded_noise(seeds, (5, 3))
    assert noise.dtype == torch.float32
    assert torch.equal(noise[0], noise[3])
    for row, seed in enumerate(seeds):
        expected = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(noise[row], expected)
    state = torch.get_rng_state()
    seeded_noise(seeds, (5, 3))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_adapter_is_found_by_the_pipelines_class(tiny_qwen_image: Path) -> None:
    assert adapter_for(tiny_qwen_image) is QwenImageAdapter
    assert adapter_for(str(tiny_qwen_image)) is QwenImageAdapter


def test_a_model_that_the_installed_diffusers_lacks_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flowfleet.models.families.qwen_image_21", None)
    with pytest.raises(ValueError, match=r"Qwen-Image-2\.1 cannot be loaded here: .*Install a newer diffusers"):
        FAMILIES["QwenImage21Pipeline"].load()


@pytest.mark.parametrize("name", sorted(name for name, family in FAMILIES.items() if not family.writes_tokens))
def test_every_registered_adapter_exists_and_is_complete(name: str, tmp_path: Path) -> None:
    if name.endswith("Pipeline"):
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    else:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    adapter = adapter_for(tmp_path)
    assert issubclass(adapter, ModelAdapter)
    assert not adapter.__abstractmethods__
    assert adapter.lora_targets


PARTS = {"Qwen3OmniMoeForConditionalGeneration": "Qwen3OmniMoeThinkerForConditionalGeneration"}
"""Models of which one part writes the text."""


@pytest.mark.parametrize("name", sorted(name for name, family in FAMILIES.items() if family.writes_tokens))
def test_every_registered_adapter_that_writes_text_is_complete(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    adapter = sequence_adapter_for(tmp_path)
    assert issubclass(adapter, SequenceAdapter)
    assert adapter.model_class.__name__ == PARTS.get(name, name)
    assert adapter.lora_targets


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"_class_name": "FrobnicatePipeline"}', "FrobnicatePipeline, which is not supported: use one of .*QwenImage"),
        ('{"_class_name": "SanaVideoPipeline"}', r"the nearest is SanaPipeline\).*docs/extending.md"),
        ("{}", "does not name a pipeline class"),
        ("[]", "does not name a pipeline class"),
        ("not json", "does not name a pipeline class"),
    ],
)
def test_a_checkpoint_of_unknown_kind_is_refused(index: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(ValueError, match=message):
        adapter_for(tmp_path)


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        adapter_for(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no model_index\.json"):
        adapter_for(tmp_path)
