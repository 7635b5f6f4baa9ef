"""A random tiny BAGEL.

`make_tiny_bagel(path)` writes a folder in the layout that ByteDance publishes: three configurations, Qwen2's tokenizer,
the transformer in `ema.safetensors` and FLUX's VAE, by its authors' names, in `ae.safetensors`; 0.6 M parameters.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen2Tokenizer

from flowfleet.models.families.bagel.checkpoint import read_config
from flowfleet.models.families.bagel.transformer import Bagel
from recipes.tiny.components import build_tokenizer

FRAMES = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
CONFIG: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""The encoder of pictures has three layers, of which two are used."""
LATENT_SIDE, VIT_SIDE = CONFIG["max_latent_size"], CONFIG["vit_max_num_patch_per_side"]
VIT_PATCH = CONFIG["vit_config"]["patch_size"]


def make_tiny_bagel(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 BAGEL under `path` and returns `path`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        write_configurations(path, make_bagel_tokenizer())
        model = Bagel(read_config(path))
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                nn.init.normal_(parameter, mean=1.0 if "norm" in name and "bias" not in name else 0.0, std=0.1)
            else:
                nn.init.normal_(parameter, std=0.12)
        state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(state, path / "ema.safetensors", metadata={"format": "pt"})
        save_file(_vae_state(), path / "ae.safetensors", metadata={"format": "pt"})
    return path


def write_configurations(path: Path, tokenizer: Qwen2Tokenizer) -> None:
    """Writes the folder's files besides weights."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(path)
    llm = CONFIG["llm_config"] | {"vocab_size": len(tokenizer)}
    whole = CONFIG | {"llm_config": llm}
    for name, content in (("config", whole), ("llm_config", llm), ("vit_config", CONFIG["vit_config"])):
        (path / f"{name}.json").write_text(json.dumps(content, indent=1))


def make_bagel_tokenizer() -> Qwen2Tokenizer:
    """The tokenizer of the tiny model that paints signs, with the tokens that frame pictures."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(FRAMES)})
    return tokenizer


def _vae_state() -> dict[str, Tensor]:
    """Random weights of FLUX's VAE by its authors' names, at the sizes of `vae_config`."""
    width, depth, blocks, latents = 32, 4, 1, 16
    state: dict[str, Tensor] = {}

    def conv(name: str, inputs: int, outputs: int, kernel: int) -> None:
        state[f"{name}.weight"] = torch.randn(outputs, inputs, kernel, kernel) / (inputs * kernel**2) ** 0.5
        state[f"{name}.bias"] = 0.1 * torch.randn(outputs)

    def norm(name: str) -> None:
        state[f"{name}.weight"], state[f"{name}.bias"] = 1 + 0.1 * torch.randn(width), 0.1 * torch.randn(width)

    def resnet(name: str) -> None:
        for number in (1, 2):
            norm(f"{name}.norm{number}")
            conv(f"{name}.conv{number}", width, width, 3)

    for side, ends in (("encoder", (3, 2 * latents)), ("decoder", (latents, 3))):
        conv(f"{side}.conv_in", ends[0], width, 3)
        conv(f"{side}.conv_out", width, ends[1], 3)
        norm(f"{side}.norm_out")
        for number in (1, 2):
            resnet(f"{side}.mid.block_{number}")
        norm(f"{side}.mid.attn_1.norm")
        for part in ("q", "k", "v", "proj_out"):
            conv(f"{side}.mid.attn_1.{part}", width, width, 1)
    for level in range(depth):
        for block in range(blocks):
            resnet(f"encoder.down.{level}.block.{block}")
        for block in range(blocks + 1):
            resnet(f"decoder.up.{level}.block.{block}")
        if level < depth - 1:
            conv(f"encoder.down.{level}.downsample.conv", width, width, 3)
        if level > 0:
            conv(f"decoder.up.{level}.upsample.conv", width, width, 3)
    return state
