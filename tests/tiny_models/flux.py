"""A random tiny FLUX.1, in both kinds.

`make_tiny_flux(path)` writes a `FluxPipeline` folder without embedded guidance and with a static schedule, as
FLUX.1-schnell is; `make_tiny_flux_distilled(path)` one with both, as FLUX.1-dev is; `make_tiny_flux_kontext(path)` a
`FluxKontextPipeline` with both. Latents are 16 channels at 1/8 size, as in the real model.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, FluxPipeline, FluxTransformer2DModel

from tests.tiny_models.stable_diffusion_3 import keep_contrast, make_kl_vae
from tests.tiny_models.text_encoders import make_clip, make_clip_tokenizer, make_t5, make_t5_tokenizer

CLIP_WIDTH = 24
T5_WIDTH = 32


def make_tiny_flux(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 `FluxPipeline` checkpoint in the manner of FLUX.1-schnell and returns `path`."""
    return _make(path, seed, distilled=False)


def make_tiny_flux_distilled(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 `FluxPipeline` checkpoint in the manner of FLUX.1-dev and returns `path`."""
    return _make(path, seed, distilled=True)


def make_tiny_flux_kontext(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 `FluxKontextPipeline` checkpoint and returns `path`."""
    return _make(path, seed, distilled=True, pipeline_class=FluxKontextPipeline)


def _make(path: Path, seed: int, *, distilled: bool, pipeline_class: Any = FluxPipeline) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip_tokenizer, t5_tokenizer = make_clip_tokenizer(), make_t5_tokenizer()
        vae = make_kl_vae(scaling_factor=0.3611, shift_factor=0.1159)
        pipeline_class(
            scheduler=_make_scheduler(dynamic=distilled),
            vae=keep_contrast(vae) if pipeline_class is FluxKontextPipeline else vae,
            text_encoder=make_clip(clip_tokenizer, CLIP_WIDTH, projection=False),
            tokenizer=clip_tokenizer,
            text_encoder_2=make_t5(t5_tokenizer, T5_WIDTH),
            tokenizer_2=t5_tokenizer,
            transformer=_make_transformer(guidance_embeds=distilled),
        ).save_pretrained(path)
    return path


def _make_scheduler(*, dynamic: bool) -> FlowMatchEulerDiscreteScheduler:
    """The configurations published with FLUX.1-dev and with FLUX.1-schnell."""
    return FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        max_image_seq_len=4096,
        base_shift=0.5,
        max_shift=1.15,
        shift=3.0 if dynamic else 1.0,
        use_dynamic_shifting=dynamic,
    )


def _make_transformer(*, guidance_embeds: bool) -> FluxTransformer2DModel:
    model = FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    return model.eval()
