"""A random tiny Stable Diffusion 3.5.

`make_tiny_stable_diffusion_3(path)` writes a `StableDiffusion3Pipeline` folder complete with three text encoders, or
without T5, as some checkpoints are. Latents are 16 channels at 1/8 size, as in the real model.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import nn

from tests.tiny_models.text_encoders import make_clip, make_clip_tokenizer, make_t5, make_t5_tokenizer

CLIP_WIDTHS = (16, 24)
T5_WIDTH = 48


def make_tiny_stable_diffusion_3(path: Path, *, seed: int = 0, t5: bool = True) -> Path:
    """Writes a random fp32 `StableDiffusion3Pipeline` checkpoint under `path` and returns `path`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip_tokenizer, t5_tokenizer = make_clip_tokenizer(), make_t5_tokenizer()
        StableDiffusion3Pipeline(
            transformer=_make_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=make_kl_vae(scaling_factor=1.5305, shift_factor=0.0609),
            text_encoder=make_clip(clip_tokenizer, CLIP_WIDTHS[0], projection=True),
            tokenizer=clip_tokenizer,
            text_encoder_2=make_clip(clip_tokenizer, CLIP_WIDTHS[1], projection=True),
            tokenizer_2=make_clip_tokenizer(),
            text_encoder_3=make_t5(t5_tokenizer, T5_WIDTH) if t5 else None,
            tokenizer_3=t5_tokenizer if t5 else None,
        ).save_pretrained(path)
    return path


def make_kl_vae(*, scaling_factor: float, shift_factor: float) -> AutoencoderKL:
    """A tiny `AutoencoderKL` with 16 latent channels at 1/8 size, in the shape of SD3's and FLUX's."""
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    return vae.eval()


def keep_contrast(vae: Any) -> Any:
    """Draws an encoder that keeps the contrast of pictures; default weights lose nearly all of it."""
    for module in (*vae.encoder.modules(), vae.quant_conv):
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            nn.init.kaiming_normal_(module.weight)
    return vae


def _make_transformer() -> SD3Transformer2DModel:
    """Three blocks, the first of them with SD3.5-medium's second attention."""
    model = SD3Transformer2DModel(
        sample_size=8,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=T5_WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=sum(CLIP_WIDTHS),
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return model.eval()
