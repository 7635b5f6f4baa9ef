"""The five parts of a Wan checkpoint, each of its real class, at a few millionths of the size.

The scheduler is the first-order one, whose steps are those that rollouts take, with the shift that Wan's own
checkpoints have for small videos. The text encoder keeps random weights: embeddings of distinct words are distinct,
which is all that the transformer needs to learn from.
"""

import json
import string
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from recipes.tiny.components import round_to_half
from recipes.tiny_video.clips import COLORS, DIRECTIONS, RADII, SHAPES

SIZES = json.loads(Path(__file__).with_suffix(".json").read_text())
MAX_TOKENS = 512
"""Length to which the pipeline pads every prompt."""


def build_pipeline() -> Any:
    """A `WanPipeline` whose transformer and autoencoder are untrained and whose other parts are final."""
    tokenizer = build_tokenizer()
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=build_text_encoder(len(tokenizer)),
        vae=build_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=build_transformer(),
    )


def build_tokenizer() -> Any:
    """A unigram model as T5's: words of the prompts are one piece each, all else is characters."""
    words = ["A", "moving", *filter(None, RADII), *COLORS, *SHAPES, *DIRECTIONS]
    characters = string.ascii_letters + string.digits + string.punctuation
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    pieces += [(f"▁{word}", -5.0) for word in words] + [(character, -8.0) for character in characters]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=MAX_TOKENS)


def build_text_encoder(vocab_size: int) -> Any:
    """A two-layer UMT5 encoder, random, frozen and rounded to fp16."""
    encoder: Any = UMT5EncoderModel(UMT5Config(vocab_size=vocab_size, **SIZES["text_encoder"]))
    round_to_half(encoder.eval().requires_grad_(False))
    return encoder


def build_vae() -> Any:
    """An untrained autoencoder: factors of eight and four, 16 channels as the real one, one residual block a stage."""
    return AutoencoderKLWan(**SIZES["vae"])


def build_transformer() -> Any:
    """An untrained transformer: five blocks, four heads of 32."""
    return WanTransformer3DModel(**SIZES["transformer"])
