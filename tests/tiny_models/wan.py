"""Random tiny Wan checkpoints: `WanPipeline` folders with transformer, VAE, UMT5 encoder, tokenizer and scheduler.

`make_tiny_wan` has one transformer, as Wan2.1; `make_tiny_wan_two_experts` two and a boundary, as Wan2.2 A14B;
`make_tiny_wan_5b` a timestep a token and a VAE of 48 channels at 1/16 size, as Wan2.2 TI2V 5B; `make_tiny_wan_image` a
`WanImageToVideoPipeline` with two experts, as Wan2.2 I2V A14B. Each takes about a second and has under 2 M parameters.
"""

import string
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

TEXT_WIDTH = 32
BOUNDARY_RATIO = 0.875
"""Boundary of Wan2.2 T2V A14B."""
_WORDS = [
    "a",
    "red",
    "green",
    "blue",
    "white",
    "black",
    "yellow",
    "ball",
    "square",
    "moving",
    "left",
    "right",
    "up",
    "down",
    "the",
    "video",
    "of",
    "on",
]


def make_tiny_wan(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 checkpoint with one transformer under `path` and returns `path`."""
    return _write(path, seed, _make_vae, scheduler=make_wan_scheduler(3.0))


def make_tiny_wan_two_experts(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 checkpoint with two experts under `path` and returns `path`."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    return _write(path, seed, _make_vae, scheduler=scheduler, boundary_ratio=BOUNDARY_RATIO)


def make_tiny_wan_5b(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 checkpoint with a timestep a token under `path` and returns `path`."""
    return _write(path, seed, _make_residual_vae, FlowMatchEulerDiscreteScheduler(shift=5.0), expand_timesteps=True)


def make_tiny_wan_image(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 `WanImageToVideoPipeline` checkpoint with two experts and returns `path`."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    made = {"boundary_ratio": 0.9, "pipeline_class": WanImageToVideoPipeline, "condition_channels": 20}
    return _write(path, seed, _make_vae, scheduler=scheduler, **made)


def make_wan_scheduler(flow_shift: float) -> UniPCMultistepScheduler:
    """The scheduler configuration published with Wan (flow_shift 3 for small and 5 for large videos)."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=flow_shift,
        num_train_timesteps=1000,
        solver_order=2,
        timestep_spacing="linspace",
        final_sigmas_type="zero",
    )


def make_tokenizer() -> T5Tokenizer:
    """A unigram model with the pieces that T5's has: a mark before each word, whole words, single characters."""
    characters = string.ascii_letters + string.digits + string.punctuation
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces = [("▁", -4.0), *((f"▁{word}", -5.0) for word in _WORDS), *((char, -6.0) for char in characters)]
    return T5Tokenizer(vocab=special + pieces, extra_ids=0, model_max_length=512)


def _write(
    path: Path,
    seed: int,
    make_vae: Any,
    scheduler: Any,
    pipeline_class: Any = WanPipeline,
    condition_channels: int = 0,
    **config: Any,
) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer, vae = make_tokenizer(), make_vae()
        pipeline_class(
            tokenizer=tokenizer,
            text_encoder=_make_text_encoder(len(tokenizer)),
            vae=vae,
            scheduler=scheduler,
            transformer=_make_transformer(vae.config.z_dim, condition_channels),
            transformer_2=(
                _make_transformer(vae.config.z_dim, condition_channels) if "boundary_ratio" in config else None
            ),
            **config,
        ).save_pretrained(path)
    return path


def _make_transformer(channels: int, condition_channels: int = 0) -> WanTransformer3DModel:
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=channels + condition_channels,
        out_channels=channels,
        text_dim=TEXT_WIDTH,
        freq_dim=32,
        ffn_dim=96,
        num_layers=2,
        rope_max_seq_len=64,
    )
    _listen_to_prompts(model)
    return model.eval()


def _listen_to_prompts(model: Any) -> None:
    """A random model attends evenly to all 512 tokens, most of which are padding, so that all prompts look alike."""
    for name, parameter in model.condition_embedder.text_embedder.named_parameters():
        if name.endswith("weight"):
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    for block in model.blocks:
        torch.nn.init.constant_(block.attn2.norm_q.weight, 3.0)
        block.attn2.to_out[0].weight.data *= 3


def _make_vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(base_dim=8, z_dim=16, num_res_blocks=1).eval()


def _make_residual_vae() -> AutoencoderKLWan:
    vae = AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=48,
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        latents_mean=torch.linspace(-0.5, 0.5, 48).tolist(),
        latents_std=torch.linspace(0.4, 1.2, 48).tolist(),
    )
    return vae.eval()


def _make_text_encoder(vocab_size: int) -> UMT5EncoderModel:
    config = UMT5Config(
        vocab_size=vocab_size,
        d_model=TEXT_WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        is_encoder_decoder=False,
    )
    return UMT5EncoderModel(config).eval()
