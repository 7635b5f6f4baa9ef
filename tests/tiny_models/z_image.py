"""A random tiny Z-Image.

`make_tiny_z_image(path)` writes a `ZImagePipeline` folder: transformer, VAE, Qwen3 text encoder, tokenizer with a chat
template, scheduler; 0.6 M parameters, half of them in the transformer's time embedding, whose width is fixed.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch import nn
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

from tests.tiny_models.qwen_image import make_tokenizer
from tests.tiny_models.stable_diffusion_3 import make_kl_vae

TEXT_WIDTH = 32
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{ '<think>\n\n</think>\n\n' }}
{%- endif -%}
{%- endif -%}
"""
"""Qwen3's for conversations of text without tools."""


def make_tiny_z_image(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 `ZImagePipeline` checkpoint under `path` and returns `path`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = make_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE
        ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=False),  # as published
            vae=make_kl_vae(scaling_factor=0.3611, shift_factor=0.1159),
            text_encoder=make_qwen3(tokenizer),
            tokenizer=tokenizer,
            transformer=_make_transformer(),
        ).save_pretrained(path)
    return path


def _make_transformer() -> ZImageTransformer2DModel:
    model = ZImageTransformer2DModel(
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 512, 512],
    )
    nn.init.normal_(model.x_pad_token)
    nn.init.normal_(model.cap_pad_token)
    return model.eval()


def make_qwen3(tokenizer: Qwen2Tokenizer) -> Qwen3Model:
    """A random Qwen3 of TEXT_WIDTH."""
    encoder: Qwen3Model = spread_prompts(Qwen3Model(qwen3_config(tokenizer, num_layers=3)))
    return encoder


def qwen3_config(tokenizer: Qwen2Tokenizer, *, num_layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def spread_prompts(encoder: Any) -> Any:
    """Draws weights at which different prompts look different; the default scale of 0.02 would make all look alike."""
    for name, parameter in encoder.named_parameters():
        if "embed_tokens" in name:
            nn.init.normal_(parameter)
        elif parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return encoder.eval()
