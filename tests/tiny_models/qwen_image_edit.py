"""A random tiny Qwen-Image-Edit for several images.

`make_tiny_qwen_image_edit(path)` writes a `QwenImageEditPlusPipeline` folder: Qwen-Image's components, with tokens for
pictures, and a processor; 0.8 M parameters. `make_tiny_qwen_image_edit_2511(path)` writes one whose transformer
modulates the condition's tokens as clean ones, as the release 2511 does.
"""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageEditPlusPipeline
from transformers import Qwen2VLImageProcessorPil

from tests.tiny_models.qwen_image import (
    make_qwen_scheduler,
    make_text_encoder,
    make_tokenizer,
    make_transformer,
    make_vae,
)
from tests.tiny_models.stable_diffusion_3 import keep_contrast

PICTURE_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
"""Names in the text encoder's configuration, and the tokens of Qwen2.5-VL."""
_CORPUS = [
    "system\nDescribe the key features of the input image (color, shape, size, texture, objects, background), then",
    " explain how the user's text instruction should alter or modify the image. Generate a new image that meets the",
    " user's requirements while maintaining consistency with the original input where appropriate.\nuser\nassistant\n",
    'Picture : Make the red green blue white black yellow sign say "',
]


def make_tiny_qwen_image_edit(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 `QwenImageEditPlusPipeline` checkpoint and returns `path`."""
    return _make(path, seed, zero_cond_t=False)


def make_tiny_qwen_image_edit_2511(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 `QwenImageEditPlusPipeline` checkpoint in the manner of release 2511 and returns `path`."""
    return _make(path, seed, zero_cond_t=True)


def _make(path: Path, seed: int, *, zero_cond_t: bool) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = make_tokenizer(_CORPUS, list(PICTURE_TOKENS.values()))
        ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in PICTURE_TOKENS.items()}
        QwenImageEditPlusPipeline(
            scheduler=make_qwen_scheduler(),
            vae=_make_vae(),
            text_encoder=make_text_encoder(tokenizer, ids),
            tokenizer=tokenizer,
            processor=None,
            transformer=make_transformer(zero_cond_t=zero_cond_t),
        ).save_pretrained(path)
        _write_processor(path)
    return path


def _make_vae() -> AutoencoderKLQwenImage:
    vae: AutoencoderKLQwenImage = keep_contrast(make_vae())
    return vae


def _write_processor(path: Path) -> None:
    """The processor's own configuration as published, but for a smaller least area; the whole one needs torchvision."""
    Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 12845056}).save_pretrained(
        path / "processor"
    )
    index = path / "model_index.json"
    named = json.loads(index.read_text(encoding="utf-8")) | {"processor": ["transformers", "Qwen2VLProcessor"]}
    index.write_text(json.dumps(named, indent=2), encoding="utf-8")
