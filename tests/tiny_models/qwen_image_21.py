"""A random tiny Qwen-Image-2.1: `make_tiny_qwen_image_21(path)` writes a `QwenImage21Pipeline` folder."""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel
from transformers import Qwen3VLForConditionalGeneration

from flowfleet.models.families.qwen_image_21 import QwenImage21Pipeline
from tests.tiny_models.krea2 import TEXT_WIDTH, qwen3_vl_config
from tests.tiny_models.qwen_image import make_qwen_scheduler, make_tokenizer
from tests.tiny_models.stable_diffusion_3 import keep_contrast
from tests.tiny_models.z_image import spread_prompts

CHANNELS = 8


def make_tiny_qwen_image_21(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 `QwenImage21Pipeline` checkpoint under `path` and returns `path`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = make_tokenizer()
        QwenImage21Pipeline(
            scheduler=make_qwen_scheduler(),
            vae=_make_vae(),
            text_encoder=spread_prompts(Qwen3VLForConditionalGeneration(qwen3_vl_config(len(tokenizer)))),
            processor=None,
            transformer=_make_transformer(),
        ).save_pretrained(path)
        tokenizer.save_pretrained(path / "processor")
        index = path / "model_index.json"
        named = json.loads(index.read_text()) | {"processor": ["transformers", "Qwen3VLProcessor"]}
        index.write_text(json.dumps(named, indent=2))
    return path


def _make_vae() -> AutoencoderKLQwenImage21:
    vae: AutoencoderKLQwenImage21 = keep_contrast(
        AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=CHANNELS,
            dim_mult=[1, 2, 4, 4, 4],
            num_res_blocks=1,
            is_residual=False,  # else random weights make nothing but noise
            latents_mean=torch.linspace(-0.5, 0.5, CHANNELS).tolist(),
            latents_std=torch.linspace(0.4, 1.2, CHANNELS).tolist(),
        )
    )
    vae.decoder.conv_out.bias.data[3] = 1.0  # mostly opaque, as pictures of the real model are
    return vae.eval()


def _make_transformer() -> QwenImage21Transformer2DModel:
    model = QwenImage21Transformer2DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=TEXT_WIDTH,
        mlp_ratio=2,
        axes_dims_rope=(4, 6, 6),
    )
    return model.eval()
