"""The five parts of a Qwen-Image checkpoint, each of its real class, at a few millionths of the size (components.json).

The scheduler's numbers are those of the real model. The tokenizer is trained so that every word of the pipeline's
prompt template is one token, as in the real vocabulary: the pipeline drops the first 34 tokens. The text encoder keeps
random weights: embeddings of distinct characters are distinct, which is all that the transformer needs to learn from.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

SIZES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
LATENT_CHANNELS = SIZES["vae"]["z_dim"]
SPECIAL_TOKENS = SIZES["special_tokens"]

TEMPLATE_WORDS = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of "
    "the objects and background:\nuser\nassistant\n"
)
SIGN_WORDS = 'A white yellow green blue red black sign that says "'


def build_pipeline() -> Any:
    """A `QwenImagePipeline` whose transformer and autoencoder are untrained and whose other parts are final."""
    tokenizer = build_tokenizer()
    return QwenImagePipeline(
        scheduler=build_scheduler(),
        vae=build_vae(),
        text_encoder=build_text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=build_transformer(),
    )


def build_scheduler() -> Any:
    """The scheduler of the real model: exponential dynamic shift that ends at 0.02."""
    return FlowMatchEulerDiscreteScheduler(**SIZES["scheduler"])


def build_tokenizer() -> Any:
    """A byte-level BPE with the real special tokens; template and sign words are one token each, all else is bytes."""
    return train_tokenizer([TEMPLATE_WORDS, SIGN_WORDS], vocab_size=2000)


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """Qwen2's tokenizer with a byte-level BPE of its own, in which words of `texts` are one token each."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    model = json.loads(bpe.to_str())["model"]
    merges: Any = [tuple(merge) for merge in model["merges"]]
    return Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=merges,
        eos_token="<|im_end|>",
        extra_special_tokens=SPECIAL_TOKENS[1:],
        model_max_length=32768,
    )


def build_text_encoder(tokenizer: Any) -> Any:
    """A two-layer Qwen2.5-VL whose random weights keep the scale of activations, frozen and rounded to fp16."""
    config = text_encoder_config(tokenizer, SIZES["text"], SIZES["vision"])
    encoder: Any = Qwen2_5_VLForConditionalGeneration(config)
    for name, weight in encoder.named_parameters():
        if "embed_tokens" in name:
            torch.nn.init.normal_(weight, std=1.0)
        elif weight.ndim > 1:
            torch.nn.init.normal_(weight, std=1.0 / math.sqrt(weight.shape[-1]))
    round_to_half(encoder.eval().requires_grad_(False))
    return encoder


def text_encoder_config(
    tokenizer: Any, text: Mapping[str, Any], vision: Mapping[str, Any], **settings: Any
) -> Qwen2_5_VLConfig:
    """A Qwen2.5-VL with the tokens of `tokenizer`; `text` and `vision` say the sizes."""
    usual = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    media = {
        f"{kind}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for kind, token in [
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        ]
    }
    return Qwen2_5_VLConfig(text_config={**usual, **text}, vision_config=dict(vision), **media, **settings)


def build_vae() -> Any:
    """An untrained autoencoder: factor of eight and 16 latent channels as the real one, one residual block a stage."""
    return AutoencoderKLQwenImage(**SIZES["vae"])


def build_transformer() -> Any:
    """An untrained transformer: six blocks, four heads of 32."""
    return QwenImageTransformer2DModel(**SIZES["transformer"])


def round_to_half(model: torch.nn.Module) -> None:
    """Round the weights to fp16 values held as fp32, so that what is computed now is what the saved file gives."""
    model.half().float()
