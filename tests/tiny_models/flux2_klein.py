"""A random tiny FLUX.2 [klein].

`make_tiny_flux2_klein(path)` writes a `Flux2KleinPipeline` folder of the base model, which takes guidance, or of the
distilled one, which ignores it. The text encoder has the 27 layers whose outputs the pipeline reads.
"""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from torch import nn
from transformers import Qwen3ForCausalLM

from tests.tiny_models.qwen_image import make_tokenizer
from tests.tiny_models.stable_diffusion_3 import keep_contrast
from tests.tiny_models.z_image import CHAT_TEMPLATE, TEXT_WIDTH, qwen3_config, spread_prompts

NUM_TEXT_LAYERS = 27


def make_tiny_flux2_klein(path: Path, *, seed: int = 0, is_distilled: bool = False) -> Path:
    """Writes a random fp32 `Flux2KleinPipeline` checkpoint under `path` and returns `path`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = make_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE
        Flux2KleinPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
            vae=_make_vae(),
            text_encoder=spread_prompts(Qwen3ForCausalLM(qwen3_config(tokenizer, num_layers=NUM_TEXT_LAYERS))),
            tokenizer=tokenizer,
            transformer=_make_transformer(),
            is_distilled=is_distilled,
        ).save_pretrained(path)
    return path


def _make_vae() -> AutoencoderKLFlux2:
    """Makes a VAE whose statistics are not the identity."""
    vae: AutoencoderKLFlux2 = keep_contrast(
        AutoencoderKLFlux2(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 16, 16),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
        )
    )
    nn.init.normal_(vae.bn.running_mean)
    nn.init.uniform_(vae.bn.running_var, 0.5, 2.0)
    return vae.eval()


def _make_transformer() -> Flux2Transformer2DModel:
    model = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * TEXT_WIDTH,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    return model.eval()
