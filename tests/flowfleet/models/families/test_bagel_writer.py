"""BAGEL as a model that writes text: questions with pictures, packed rows, drawn tokens, and what painting changes.

Its logits are held to vLLM-Omni's in tests/services/rollout/test_vllm_omni_bagel.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from flowfleet.models.families.bagel.transformer import Bagel
from flowfleet.models.registry import adapter_for, sequence_adapter_for
from flowfleet.models.sequences.adapter import SequenceAdapter, Tokens
from flowfleet.models.sequences.prompts import PromptMedia
from flowfleet.models.settings import Size
from flowfleet.planning.sequence_flops import sequence_flops
from flowfleet.proto.rollout_pb2 import LoraSpec
from flowfleet.weights.lora import install_lora, named_adapter_parameters
from recipes.tiny_unified.bagel import VIT_PATCH, VIT_SIDE
from services.rollout.engines.base import GenerationRequest, Noise, PromptGroup, Sampling, SequenceSampling
from services.rollout.engines.tokens import TokenSampler, batches
from tests.tiny_models import make_tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("bagel", tmp_path_factory.mktemp("models") / "bagel")


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> SequenceAdapter:
    return sequence_adapter_for(checkpoint).load(checkpoint, dtype=torch.float32)


def test_its_flops_are_not_counted_and_say_so(adapter: SequenceAdapter) -> None:
    """Its attention is not one of transformers' causal layers: no MFU is better than a wrong one."""
    assert sequence_flops(adapter) is None


def picture(seed: int, height: int = 30, width: int = 20) -> PromptMedia:
    content = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    return PromptMedia("picture", content)


def sequences(adapter: SequenceAdapter) -> list[Tokens]:
    written = torch.tensor([5, 9, 6, 7])
    media = [[picture(1)], [], [picture(2), picture(3, 20, 60)]]
    return [Tokens(adapter.encode(f"a question {n}", own), written[: n + 2]) for n, own in enumerate(media)]


def test_a_question_is_its_pictures_then_its_text_then_the_start_of_an_answer(adapter: SequenceAdapter) -> None:
    tokenizer = adapter.processor.tokenizer
    ids = tokenizer.convert_tokens_to_ids
    question = adapter.encode("which color", [picture(1, 48, 48)])
    count = VIT_SIDE**2
    text = [ids("<|im_start|>"), *tokenizer("which color")["input_ids"], ids("<|im_end|>"), ids("<|im_start|>")]
    shown = [ids("<|vision_start|>"), *[ids("<|image_pad|>")] * count, ids("<|vision_end|>")]
    assert question.token_ids.tolist() == [*shown, *text]
    assert adapter.stop_ids == {ids("<|im_end|>")}
    inputs = adapter.model_inputs([Tokens(question, torch.tensor([5, 6]))])
    assert inputs["position_ids"].tolist() == [[0] * (count + 2) + list(range(1, len(text) + 2))]


def test_patches_are_rows_of_pixels_with_colors_last(adapter: SequenceAdapter) -> None:
    """A picture of the encoder's own size is not resized; two halves of it differ."""
    side = VIT_SIDE * VIT_PATCH
    content = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    content[:, :32], content[:, 32:] = 10, 200
    inputs = adapter.encode("x", [PromptMedia("picture", content)]).inputs
    values = inputs["patches"].reshape(VIT_SIDE, VIT_SIDE, VIT_PATCH, VIT_PATCH, 3)
    pixels = values.transpose(1, 2).reshape(side, side, 3)
    torch.testing.assert_close(pixels[:, :8], torch.full((side, 8, 3), 10 / 127.5 - 1), rtol=0, atol=0.1)
    torch.testing.assert_close(pixels[:, -8:], torch.full((side, 8, 3), 200 / 127.5 - 1), rtol=0, atol=0.1)
    assert inputs["patch_places"].tolist() == list(range(VIT_SIDE**2))


def test_packed_sequences_have_the_log_probs_of_each_alone(adapter: SequenceAdapter) -> None:
    items = sequences(adapter)
    with torch.no_grad():
        together = adapter.log_probs(items, temperature=0.7)
        alone = torch.cat([adapter.log_probs([item], temperature=0.7) for item in items])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_pictures_make_a_difference(adapter: SequenceAdapter) -> None:
    def log_probs(seed: int) -> torch.Tensor:
        question = adapter.encode("which color", [picture(seed)])
        with torch.no_grad():
            return adapter.log_probs([Tokens(question, torch.tensor([5, 6]))], temperature=1.0)

    assert (log_probs(1) - log_probs(2)).abs().min() > 1e-4


def test_drawn_tokens_have_the_log_probs_of_one_forward(adapter: SequenceAdapter) -> None:
    """Greedy tokens from the cache are the likeliest of the packed forward, so that both see the same."""
    sampler = TokenSampler(adapter)
    group = PromptGroup(0, "which color", (0, 1), (7, 8), inputs=(picture(1),))
    request = GenerationRequest(
        (group,), Sampling(Size(16, 16), 1), Noise(), "none", sequence=SequenceSampling(6, temperature=0)
    )
    prompts = sampler.encode(request)
    (rows,) = batches(request, prompts, 8)
    made = sampler.sample(request, prompts, rows, lambda: None)
    assert made.samples[0].text == made.samples[1].text
    written: list[int] = []
    for _ in range(made.samples[0].num_tokens):
        inputs = adapter.model_inputs([Tokens(prompts[0], torch.tensor([*written, 0]))])
        with torch.no_grad():
            logits = adapter.transformer(**inputs).logits[0, -1]
        logits[sorted(adapter.undrawn_ids)] = -torch.inf
        written.append(int(logits.argmax()))
    assert adapter.text(torch.tensor(written)) == made.samples[0].text


def test_gradients_reach_the_understanding_expert_alone(adapter: SequenceAdapter) -> None:
    adapter.transformer.requires_grad_(True)
    adapter.log_probs(sequences(adapter), temperature=1.0).sum().backward()  # type: ignore[no-untyped-call]
    reached = {name for name, parameter in adapter.transformer.named_parameters() if parameter.grad is not None}
    missed = {name for name, _ in adapter.transformer.named_parameters()} - reached
    adapter.transformer.requires_grad_(False).zero_grad()
    painting = ("vae2llm.", "llm2vae.", "time_embedder.")
    assert missed == {name for name in missed | reached if "_moe_gen" in name or name.startswith(painting)}


def test_lora_leaves_the_encoder_of_pictures_and_the_painting_expert(checkpoint: Path) -> None:
    adapter = sequence_adapter_for(checkpoint).load(checkpoint, dtype=torch.float32, components=("transformer",))
    names = install_lora(adapter.experts, LoraSpec(rank=2, alpha=4, target_modules=list(adapter.lora_targets)))
    assert len(names) == 2 * 4 * adapter.transformer.config.num_layers
    assert all(name.startswith("model.language_model.") and "_moe_gen" not in name for name in names)


def test_what_painting_trains_by_default_leaves_answers_bit_for_bit(checkpoint: Path) -> None:
    """An adapter of the painting expert moves velocities; answers cannot tell."""
    answers = sequence_adapter_for(checkpoint).load(checkpoint, dtype=torch.float32)
    model: Bagel = answers.transformer
    painter = adapter_for(checkpoint)
    items, size = sequences(answers), Size(32, 32)
    latents = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        whole = painter.load(checkpoint, dtype=torch.float32, components=("text_encoder",))
        whole.pipeline.transformer = model
        with torch.no_grad():
            velocity = whole.velocity(latents, torch.tensor(500.0), whole.encode(["a"]), size=size)
            return answers.log_probs(items, temperature=1.0), velocity

    before = both()
    install_lora({"model": model}, LoraSpec(rank=2, alpha=4, target_modules=list(painter.lora_targets)))
    for parameter in named_adapter_parameters({"model": model}).values():
        torch.nn.init.normal_(parameter)
    after = both()
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[1], after[1], atol=1e-3)


def test_sounds_and_placeholders_are_refused(adapter: SequenceAdapter) -> None:
    with pytest.raises(ValueError, match="looks at pictures alone"):
        adapter.encode("what", [PromptMedia("sound", np.zeros(100, np.float32))])
    with pytest.raises(ValueError, match="must not contain"):
        adapter.encode("what is <|image_pad|>")
