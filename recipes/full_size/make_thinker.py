"""A folder of Qwen3-Omni's Thinker at its real width without weights, for jobs with `model.load_format = "dummy"`.

Sizes are those of Qwen3-Omni-30B-A3B: layers of 128 experts of which a token takes 8, and the encoders of pictures and
sounds. The tokenizer is the tiny Thinker's, so that a word is a token; of the model's 152,064 tokens it knows the first
few.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Qwen3OmniMoeThinkerConfig

from recipes.tiny_thinker.model import configuration, save_processors

NUM_LAYERS = 48
BYTES_OF_LAYER, BYTES_OF_REST = 1.25e9, 3.7e9
"""Weights in bfloat16: a layer of the language model, and all that is not one."""
_TEXT: dict[str, Any] = {
    "vocab_size": 152_064,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 65_536,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20]},
}
_VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_AUDIO: dict[str, Any] = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "output_dim": 2048,
    "downsample_hidden_size": 480,
}
_TOKENS = ("image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id", "vision_end_token_id")


def write_folder(directory: Path, num_layers: int, *, tiny: bool = False) -> Path:
    """Writes the folder and returns it. `tiny` keeps every part and shrinks it."""
    directory.mkdir(parents=True, exist_ok=True)
    config = configuration()
    if tiny:
        config.text_config.num_hidden_layers = num_layers
    else:
        ids = {name: getattr(config, name) for name in (*_TOKENS, "audio_start_token_id")}
        text = _TEXT | {"num_hidden_layers": num_layers}
        config = Qwen3OmniMoeThinkerConfig(
            text_config=text, vision_config=_VISION, audio_config=_AUDIO, position_id_per_seconds=13, **ids
        )
    config.architectures = ["Qwen3OmniMoeThinkerForConditionalGeneration"]
    config.save_pretrained(directory)
    patch = config.vision_config.patch_size
    save_processors(directory, config, {"shortest_edge": 16 * patch**2, "longest_edge": 4096 * patch**2})
    return directory
