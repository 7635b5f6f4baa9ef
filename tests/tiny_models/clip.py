"""A random tiny CLIP of both towers, saved as a checkpoint that `CLIPModel` and `CLIPProcessor` load."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel, CLIPProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.tiny_models.text_encoders import make_clip_tokenizer

SIDE = 32
"""Pixels of what the vision tower sees."""


def save_clip(folder: Path, *, width: int = 16, seed: int = 0, **vision: Any) -> Path:
    """Writes model and processor to `folder`, and returns it. `vision` changes the vision tower's configuration.

    Its weights are so large that different pictures and prompts have clearly different embeddings.
    """
    tokenizer = make_clip_tokenizer()
    tower = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    picture = {"image_size": SIDE, "patch_size": 8} | vision
    config = CLIPConfig(text_config=tower | text, vision_config=tower | picture, projection_dim=width)
    torch.manual_seed(seed)
    model = CLIPModel(config)
    randomize(model)
    model.save_pretrained(folder)
    size = model.config.vision_config.image_size
    processor = CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    CLIPProcessor(processor, tokenizer).save_pretrained(folder)
    return folder


def randomize(model: nn.Module) -> None:
    """Weights at which what goes in keeps its size from layer to layer."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=1.0 if "embedding" in name else parameter[0].numel() ** -0.5)
