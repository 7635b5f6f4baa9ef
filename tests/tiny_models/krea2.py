"""A random tiny Krea 2: `make_tiny_krea2(path)` writes a `Krea2Pipeline` folder with Qwen-Image's VAE and Qwen3-VL."""

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from transformers import Qwen3VLConfig, Qwen3VLModel

from tests.tiny_models.qwen_image import make_tokenizer, make_vae
from tests.tiny_models.z_image import spread_prompts

TEXT_WIDTH = 32
LAYERS = (1, 2)


def make_tiny_krea2(path: Path, *, seed: int = 0, is_distilled: bool = False) -> Path:
    """Writes a random fp32 `Krea2Pipeline` checkpoint under `path` and returns `path`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = make_tokenizer()
        Krea2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400),
            vae=make_vae(),
            text_encoder=spread_prompts(Qwen3VLModel(qwen3_vl_config(len(tokenizer)))),
            tokenizer=tokenizer,
            transformer=_make_transformer(),
            text_encoder_select_layers=LAYERS,
            is_distilled=is_distilled,
        ).save_pretrained(path)
    return path


def qwen3_vl_config(vocab_size: int, **tokens: int) -> Qwen3VLConfig:
    """`tokens`: ids of pictures, such as `image_token_id`."""
    text: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
    }
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 1,
        "out_hidden_size": TEXT_WIDTH,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)


def _make_transformer() -> Krea2Transformer2DModel:
    model = Krea2Transformer2DModel(
        in_channels=64,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        timestep_embed_dim=16,
        text_hidden_dim=TEXT_WIDTH,
        num_text_layers=len(LAYERS),
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    return model.eval()
