"""HunyuanImage-3.0's adapter on tiny random checkpoints, and against vLLM-Omni's transformer, tokenizer and VAE."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowfleet.conformance.models import RAGGED, SEEDS, sample_ode
from flowfleet.models.embeds import pad_embeds
from flowfleet.models.families.hunyuan_image3 import prompts as sequences
from flowfleet.models.families.hunyuan_image3.adapter import HunyuanImage3Adapter, unconditional
from flowfleet.models.families.hunyuan_image3.transformer import (
    Experts,
    HunyuanImage3Transformer,
    TransformerConfig,
    rotary_table,
)
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Guidance, Size
from flowfleet.planning.live import LiveBytes
from flowfleet.proto.rollout_pb2 import LoraSpec
from flowfleet.weights.lora import install_lora
from recipes.tiny_unified.hunyuan_image3 import CONFIG, SYSTEM_PROMPT
from tests.flowfleet.models import parity
from tests.tiny_models import make_tiny

SQUARE = Size(64, 64)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("hunyuan_image3", tmp_path_factory.mktemp("models") / "hunyuan_image3")


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("hunyuan_image3_instruct", tmp_path_factory.mktemp("models") / "instruct")


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> HunyuanImage3Adapter:
    return HunyuanImage3Adapter.load(checkpoint, dtype=torch.float32)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["hunyuan_image3", "hunyuan_image3_instruct"])
def test_sequence_velocity_and_vae_are_vllm_omnis(kind: str, tmp_path: Path) -> None:
    """Both branches of guidance in float32, from the prompt's text on; all weights by the names of its loader. The
    rows are a padded batch here and one by one there."""
    path = make_tiny(kind, tmp_path / kind)
    widen_time(path)
    adapter = HunyuanImage3Adapter.load(path, dtype=torch.float32)
    size, timesteps = Size(64, 48), torch.tensor([900.0, 300.0, 20.0])
    latents, pixels = adapter.initial_latents(SEEDS, size), torch.rand(1, 3, 32, 48) * 2 - 1
    given = {"latents": latents, "timesteps": timesteps, "size": torch.tensor([64, 48])}
    given |= {"planes": latents[:1].clone(), "pixels": pixels}
    given |= {f"prompt_{row}": torch.tensor(list(text.encode()), dtype=torch.uint8) for row, text in enumerate(RAGGED)}
    found = run_peer(path, given, tmp_path)
    prompts = adapter.encode(RAGGED)
    dropped = unconditional(prompts, adapter.encode([" "]).rows(len(RAGGED)))
    with torch.no_grad():
        velocities = [adapter.velocity(latents, timesteps, which, size=size) for which in (prompts, dropped)]
        decoded, moments = adapter.vae.decode(latents[:1]), adapter.vae.encode(pixels)
    for row in range(len(RAGGED)):
        for name, velocity in zip(("positive", "negative"), velocities, strict=True):
            torch.testing.assert_close(velocity[row], found[f"{name}_{row}"], rtol=0, atol=TOLERANCE)
        ids, own = adapter._ids(RAGGED[row])
        told = found[f"ids_{row}"]
        assert told[0, :-2].tolist() == ids
        cfg = adapter.pipeline.tokenizer.convert_tokens_to_ids("<cfg>")
        assert told[1, slice(*own)].tolist() == [cfg] * (own[1] - own[0])
        assert adapter.pipeline.tokenizer.convert_ids_to_tokens(told[0, -2:].tolist()) == [
            "<img_size_1024>",
            f"<img_ratio_{sequences.ratio_token(size, 1024, 33)}>",
        ]
    assert (velocities[0] - velocities[1]).abs().max() > 100 * TOLERANCE
    torch.testing.assert_close(decoded, found["pixels"], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(moments, found["moments"].chunk(2, dim=1)[0], rtol=0, atol=TOLERANCE)


def widen_time(path: Path) -> None:
    """Gives the VAE of a checkpoint the frames of the published one; its tensors are drawn again."""
    config = json.loads((path / "config.json").read_text())
    config["vae"] |= {"ffactor_temporal": 4}
    from recipes.tiny_unified.hunyuan_image3 import make_tensors, save_shards

    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    save_shards(path, make_tensors(config))


def run_peer(path: Path, given: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    inputs, outputs = folder / "inputs.safetensors", folder / "outputs.safetensors"
    save_file(given, inputs)
    module = "tests.flowfleet.models.families.hunyuan_image3_peer"
    done = subprocess.run(
        [sys.executable, "-m", module, str(path), str(inputs), str(outputs)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(outputs)


def test_experts_are_a_loop_over_the_tokens() -> None:
    """Value and gradients, in float64, of tokens whose experts are given."""
    config = TransformerConfig.of(CONFIG)
    experts = Experts(config).double()
    tokens = torch.randn(7, config.hidden_size, dtype=torch.float64, requires_grad=True)
    scores = torch.rand(7, 2, dtype=torch.float64)
    chosen = torch.tensor([[0, 1], [1, 5], [7, 1], [5, 0], [1, 0], [7, 5], [0, 7]])

    def loop() -> Tensor:
        rows = []
        for token, weights, numbers in zip(tokens, scores, chosen.tolist(), strict=True):
            total = torch.zeros_like(token)
            for weight, number in zip(weights, numbers, strict=True):
                up, gate = (experts.gate_and_up_proj[number] @ token).chunk(2)
                total = total + weight * (experts.down_proj[number] @ (torch.nn.functional.silu(gate) * up))
            rows.append(total)
        return torch.stack(rows)

    results = []
    for is_ours in (True, False):
        experts = experts.float() if is_ours else experts.double()
        out = experts(tokens.float(), scores.float(), chosen).double() if is_ours else loop()
        given = torch.autograd.grad(out.square().sum(), [tokens, *experts.parameters()])
        results.append([out.detach(), *(gradient.double() for gradient in given)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_rotary_positions_of_a_picture_lie_around_its_place() -> None:
    """2 × 4 tokens behind three of text and the timestep: rows at 4 + 3 + y, columns at 4 + 2 + x."""
    config = TransformerConfig.of(CONFIG)
    cos, _ = rotary_table(3, (2, 4), None, config, torch.device("cpu"))
    theta = 10000.0 ** (-torch.arange(0, 16, 2).float() / 16)
    places = [(i, i) for i in range(4)] + [(4 + 3 + y, 4 + 2 + x) for y in range(2) for x in range(4)]
    expected = torch.stack([torch.tensor([y, x] * 4) * theta for y, x in places]).cos()
    torch.testing.assert_close(cos[0, 0], expected)


def test_the_schedule_is_shifted_once(adapter: HunyuanImage3Adapter) -> None:
    for steps, shift, factor in ((50, None, 3.0), (7, 1.5, 1.5), (1, None, 3.0)):
        schedule = adapter.schedule(steps, SQUARE, shift)
        even = [1 - i / steps for i in range(steps + 1)]
        expected = torch.tensor([factor * t / (1 + (factor - 1) * t) for t in even])
        torch.testing.assert_close(schedule.sigmas, expected, rtol=0, atol=1e-6)
        assert torch.equal(schedule.timesteps, 1000 * schedule.sigmas[:-1])
        assert bool((schedule.sigmas.diff() < 0).all())


def test_a_blank_negative_prompt_drops_the_text_and_another_is_its_own(adapter: HunyuanImage3Adapter) -> None:
    prompts, blank, told = adapter.encode(RAGGED), adapter.encode([" "]), adapter.encode(["a gray blur"])
    dropped = unconditional(prompts, blank.rows(3))
    cfg = prompts.extras["tokens"][0, 0]
    for row, (start, stop) in enumerate(prompts.extras["text"].tolist()):
        assert torch.equal(dropped.embeds[row, start:stop], cfg.expand(stop - start, -1))
        assert torch.equal(dropped.embeds[row, :start], prompts.embeds[row, :start])
        assert torch.equal(dropped.embeds[row, stop:], prompts.embeds[row, stop:])
    latents, timestep, guidance = adapter.initial_latents(SEEDS, SQUARE), torch.tensor(500.0), Guidance(5.0)
    with torch.no_grad():
        p = adapter.velocity(latents, timestep, prompts, size=SQUARE)
        for negative, alone in ((blank, dropped), (told, told)):
            n = adapter.velocity(latents, timestep, alone, size=SQUARE)
            guided = adapter.velocity(latents, timestep, prompts, size=SQUARE, guidance=guidance, negative=negative)
            torch.testing.assert_close(guided, n + 5.0 * (p - n), rtol=1e-5, atol=1e-5)
        mixed = unconditional(prompts, adapter.encode(["", "a gray blur", ""]))
    assert torch.equal(mixed.embeds[1][mixed.mask[1]], told.embeds[0])
    assert torch.equal(mixed.embeds[0][mixed.mask[0]], dropped.embeds[0][dropped.mask[0]])


def test_templates_and_the_system_prompt_come_from_the_checkpoint(instruct: Path, tmp_path: Path) -> None:
    adapter = HunyuanImage3Adapter.load(instruct, dtype=torch.float32, components=("text_encoder",))
    ids, own = adapter._ids("A red sign")
    tokenizer = adapter.pipeline.tokenizer
    assert tokenizer.decode(ids) == f"<|startoftext|>{SYSTEM_PROMPT}\n\nUser: A red sign\n\nAssistant: <answer><boi>"
    assert tokenizer.decode(ids[slice(*own)]) == "A red sign"
    bare = shutil.copytree(instruct, tmp_path / "bare")
    (bare / "system_prompt.py").unlink()
    with pytest.raises(ValueError, match=r"no system prompt 'en_unified' in its system_prompt\.py"):
        HunyuanImage3Adapter.load(bare, dtype=torch.float32)
    (bare / "system_prompt.py").write_text("import os\nunified_system_prompt_en = os.getcwd()\n")
    with pytest.raises(ValueError, match="no system prompt"):
        HunyuanImage3Adapter.load(bare, dtype=torch.float32)


def test_ratios_are_between_one_to_four_and_four_to_one() -> None:
    known = sequences.ratios(1024)
    assert len(known) == sequences.RATIOS
    assert known[:33] == sorted(known[:33])
    assert known[0] == 1 / known[32] == 0.25
    assert known[16] == 1.0
    assert known[33:] == [4 / 3, 16 / 9, 3 / 4, 9 / 16]
    for size, number in ((Size(1024, 1024), 16), (Size(512, 512), 16), (Size(2048, 512), 32), (Size(1280, 720), 34)):
        assert sequences.ratio_token(size, 1024, 37) == number
    assert sequences.ratio_token(Size(1280, 720), 1024, 33) == min(
        range(33), key=lambda number: abs(known[number] - 16 / 9)
    )


def test_media_are_encoded_and_decoded_by_the_scaled_vae(adapter: HunyuanImage3Adapter) -> None:
    size = Size(32, 48)
    frames = torch.randint(0, 256, (2, 1, 32, 48, 3), dtype=torch.uint8)
    latents = adapter.encode_media(frames, size)
    with torch.no_grad():
        mode = adapter.vae.encode(frames[:, 0].permute(0, 3, 1, 2).float() / 127.5 - 1)
        pictures = adapter.vae.decode(mode)
    torch.testing.assert_close(latents, mode * CONFIG["vae"]["scaling_factor"], rtol=1e-5, atol=1e-5)
    expected = (pictures / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    parity.assert_same_pictures(adapter.decode(latents, size), expected)
    given = latents[:1].requires_grad_(True)
    pixels = adapter.pixels(given, size)
    torch.testing.assert_close(pixels.detach(), (pictures[:1] / 2 + 0.5).clamp(0, 1), rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(pixels.sum(), [given])
    assert gradient.abs().max() > 0


def test_decoding_computes_activations_again_for_the_same_gradient(checkpoint: Path) -> None:
    """The same bits of pixels and gradient, from less than half of the memory."""
    adapter = HunyuanImage3Adapter.load(checkpoint, dtype=torch.float32, components=("vae",))
    latents = torch.randn(1, *adapter.latent_shape(SQUARE), generator=torch.Generator().manual_seed(0))
    found, peaks = [], []
    for repeats in (False, True):
        if repeats:
            adapter.checkpoint_decoding()
        leaf = latents.clone().requires_grad_()
        with LiveBytes() as live:
            pixels = adapter.pixels(leaf, SQUARE)
            (gradient,) = torch.autograd.grad((pixels**2).sum(), leaf)
        found.append((pixels.detach(), gradient))
        peaks.append(live.peak)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert peaks[1] < peaks[0] / 2


def test_prompts_make_a_difference_and_padding_none(adapter: HunyuanImage3Adapter) -> None:
    prompts, latents = adapter.encode(RAGGED[:2]), adapter.initial_latents(SEEDS[:2], SQUARE)
    with torch.no_grad():
        tight, wide = (
            adapter.velocity(latents, torch.tensor(500.0), which, size=SQUARE)
            for which in (prompts, pad_embeds(prompts, 70))
        )
    torch.testing.assert_close(tight, wide, rtol=0, atol=1e-5)
    with torch.no_grad():
        swapped = adapter.velocity(latents, torch.tensor(500.0), prompts.select([1, 0]), size=SQUARE)
    assert (tight - swapped).abs().mean() > 1e-2 * tight.std()


def test_rows_do_not_depend_on_their_batch(adapter: HunyuanImage3Adapter) -> None:
    prompts, latents = adapter.encode(RAGGED), adapter.initial_latents(SEEDS, SQUARE)
    timesteps = torch.tensor([900.0, 20.0, 500.0])
    with torch.no_grad():
        together = adapter.velocity(latents, timesteps, prompts, size=SQUARE)
        for row in range(3):
            alone = adapter.velocity(latents[row : row + 1], timesteps[row], adapter.encode([RAGGED[row]]), size=SQUARE)
            torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_gradients_flow(adapter: HunyuanImage3Adapter, scale: float) -> None:
    parity.assert_gradients_flow(adapter, SQUARE, Guidance(scale))


def test_a_trainer_loads_the_transformer_alone(checkpoint: Path, adapter: HunyuanImage3Adapter) -> None:
    trainer = adapter_for(checkpoint).load(checkpoint, dtype=torch.float32, components=("transformer",))
    assert isinstance(trainer, HunyuanImage3Adapter)
    parity.assert_trains_alone(trainer, adapter, Size(64, 96))


def test_lora_reaches_every_layer(checkpoint: Path) -> None:
    trainer = HunyuanImage3Adapter.load(checkpoint, dtype=torch.float32, components=("transformer",))
    names = install_lora(trainer.experts, LoraSpec(rank=2, alpha=4, target_modules=list(trainer.lora_targets)))
    for layer in range(3):
        for target in trainer.lora_targets:
            assert any(f".layers.{layer}." in name and f".{target}.lora_A" in name for name in names)


def test_computes_in_bfloat16(checkpoint: Path) -> None:
    loaded = HunyuanImage3Adapter.load(checkpoint, dtype=torch.bfloat16)
    parity.assert_computes_in(loaded, torch.bfloat16, SQUARE)
    assert {parameter.dtype for parameter in loaded.vae.parameters()} == {torch.float32}


def test_loading_writes_nothing_to_the_terminal(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    HunyuanImage3Adapter.load(checkpoint, dtype=torch.float32)
    assert capfd.readouterr() == ("", "")


def test_the_published_size_has_80_billion_parameters() -> None:
    published: dict[str, Any] = CONFIG | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "num_experts": 64,
        "moe_topk": [8] * 32,
        "num_shared_expert": [1] * 32,
        "moe_intermediate_size": [3072] * 32,
        "intermediate_size": 3072,
        "patch_embed_hidden_dim": 1024,
    }
    with torch.device("meta"):
        model = HunyuanImage3Transformer(TransformerConfig.of(published))
    layer = 64 * 3 * 4096 * 3072 + 3 * 4096 * 3072 + 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 4096 * 64
    layer += 2 * 4096 + 2 * 128
    assert sum(parameter.numel() for parameter in model.model.parameters()) == 32 * layer
    total = sum(parameter.numel() for parameter in model.parameters()) + 2 * 133120 * 4096
    assert math.isclose(total, 80e9, rel_tol=0.02)


def test_other_kinds_and_damaged_folders_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    for name, value, told in (
        ("cfg_distilled", True, "is distilled"),
        ("patch_size", 2, "has patch_size = 2"),
        ("moe_topk", [2, 3, 2], "different moe_topk"),
        ("num_hidden_layers", None, "lacks"),
        ("num_experts", 4, "has shape"),
        ("num_hidden_layers", 4, "has no weights for"),
    ):
        folder = tmp_path / f"{name}-{value}"
        shutil.copytree(checkpoint, folder)
        config = json.loads((folder / "config.json").read_text()) | {name: value}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=told):
            HunyuanImage3Adapter.load(folder, dtype=torch.float32, components=("transformer",))


def test_wrong_sizes_and_inputs_are_refused(adapter: HunyuanImage3Adapter) -> None:
    parity.assert_wrong_sizes_are_refused(adapter)
    with pytest.raises(ValueError, match="no condition images"):
        adapter.encode(["a"], images=[[Image.new("RGB", (8, 8))]])
    with pytest.raises(ValueError, match="needs negative"):
        sample_ode(adapter, adapter.encode(RAGGED), SQUARE, 1, Guidance(2.0))
