"""Random tiny HunyuanVideo-1.5: `make_tiny_hunyuan_video_15(path)` writes a `HunyuanVideo15Pipeline` folder,
`make_tiny_hunyuan_video_15_image(path)` a `HunyuanVideo15ImageToVideoPipeline` with SigLIP."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

from tests.tiny_models.qwen_image import make_tokenizer
from tests.tiny_models.z_image import CHAT_TEMPLATE, TEXT_WIDTH, spread_prompts

CHANNELS, GLYPH_WIDTH, SEEN_WIDTH = 4, 16, 16


def make_tiny_hunyuan_video_15(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 `HunyuanVideo15Pipeline` checkpoint under `path` and returns `path`."""
    return _make(path, seed, HunyuanVideo15Pipeline)


def make_tiny_hunyuan_video_15_image(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 `HunyuanVideo15ImageToVideoPipeline` checkpoint under `path` and returns `path`."""
    vision = SiglipVisionConfig(
        hidden_size=SEEN_WIDTH,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = SiglipVisionModel(vision).eval()
    processor = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    return _make(path, seed, HunyuanVideo15ImageToVideoPipeline, image_encoder=encoder, feature_extractor=processor)


def _make(path: Path, seed: int, pipeline_class: Any, **parts: Any) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = make_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE
        pipeline_class(
            text_encoder=spread_prompts(Qwen2_5_VLTextModel(_text_config(len(tokenizer)))),
            tokenizer=tokenizer,
            transformer=_make_transformer(),
            vae=_make_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
            text_encoder_2=_make_byt5(),
            tokenizer_2=ByT5Tokenizer(),
            guider=ClassifierFreeGuidance(guidance_scale=1.0),
            **parts,
        ).save_pretrained(path)
    return path


def _text_config(vocab_size: int) -> Qwen2_5_VLTextConfig:
    return Qwen2_5_VLTextConfig(
        vocab_size=vocab_size,
        hidden_size=TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=0,
    )


def _make_byt5() -> T5EncoderModel:
    config = T5Config(
        vocab_size=384, d_model=GLYPH_WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu"
    )
    return T5EncoderModel(config).eval()


def _make_vae() -> AutoencoderKLHunyuanVideo15:
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=CHANNELS, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1, scaling_factor=1.03682
    )
    return vae.eval()


def _make_transformer() -> HunyuanVideo15Transformer3DModel:
    model = HunyuanVideo15Transformer3DModel(
        in_channels=2 * CHANNELS + 1,
        out_channels=CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=TEXT_WIDTH,
        text_embed_2_dim=GLYPH_WIDTH,
        image_embed_dim=SEEN_WIDTH,
        rope_axes_dim=(4, 6, 6),
        target_size=64,
    )
    return model.eval()
