"""A random tiny LTX-2: `make_tiny_ltx2(path)` writes an `LTX2Pipeline` folder with both VAEs, a vocoder and Gemma 3."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

from tests.tiny_models.sana import make_gemma_tokenizer
from tests.tiny_models.z_image import spread_prompts

TEXT_WIDTH, CHANNELS, SOUND_CHANNELS, MEL_BINS = 32, 4, 2, 8


def make_tiny_ltx2(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 `LTX2Pipeline` checkpoint under `path` and returns `path`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = make_gemma_tokenizer()
        LTX2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True,
                base_image_seq_len=1024,
                max_image_seq_len=4096,
                base_shift=0.95,
                max_shift=2.05,
                shift_terminal=0.1,
            ),  # as published
            vae=_make_vae(),
            audio_vae=_make_audio_vae(),
            text_encoder=_make_gemma(len(tokenizer)),
            tokenizer=tokenizer,
            connectors=_make_connectors(),
            transformer=_make_transformer(),
            vocoder=_make_vocoder(),
        ).save_pretrained(path)
    return path


def _make_gemma(vocab_size: int) -> Gemma3ForConditionalGeneration:
    text = Gemma3TextConfig(
        vocab_size=vocab_size,
        hidden_size=TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        pad_token_id=0,
    )
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=28,
        patch_size=14,
    )
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return spread_prompts(Gemma3ForConditionalGeneration(config))


def _make_connectors() -> LTX2TextConnectors:
    return LTX2TextConnectors(
        caption_channels=TEXT_WIDTH,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=16,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=8,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=16,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=8,
    ).eval()


def _make_vae() -> AutoencoderKLLTX2Video:
    vae = AutoencoderKLLTX2Video(
        latent_channels=CHANNELS,
        block_out_channels=(8, 16, 32),
        down_block_types=("LTX2VideoDownBlock3D",) * 3,
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        spatio_temporal_scaling=(True,) * 3,
        downsample_type=("spatiotemporal",) * 3,
        patch_size=2,
        spatial_compression_ratio=16,
        temporal_compression_ratio=8,
    )
    vae.latents_mean.normal_(std=0.1)
    vae.latents_std.uniform_(0.5, 1.5)
    return vae.eval()


def _make_audio_vae() -> AutoencoderKLLTX2Audio:
    vae = AutoencoderKLLTX2Audio(
        base_channels=SOUND_CHANNELS * MEL_BINS // 4,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        resolution=32,
        latent_channels=SOUND_CHANNELS,
        mel_bins=MEL_BINS,
    )
    vae.latents_mean.normal_(std=0.1)
    vae.latents_std.uniform_(0.5, 1.5)
    return vae.eval()


def _make_vocoder() -> LTX2Vocoder:
    vocoder = LTX2Vocoder(
        in_channels=2 * MEL_BINS,
        hidden_channels=16,
        upsample_kernel_sizes=[10, 16],
        upsample_factors=[10, 16],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    )
    return vocoder.eval()


def _make_transformer() -> LTX2VideoTransformer3DModel:
    model = LTX2VideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        vae_scale_factors=(8, 16, 16),
        audio_in_channels=SOUND_CHANNELS * MEL_BINS // 4,
        audio_out_channels=SOUND_CHANNELS * MEL_BINS // 4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        num_layers=2,
        caption_channels=TEXT_WIDTH,
        rope_type="split",
    )
    return model.eval()
