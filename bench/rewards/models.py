"""Checkpoints for the scorers around models, of the sizes that are published and with random weights: what a picture
costs does not depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    RTDetrConfig,
    RTDetrForObjectDetection,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.rt_detr.image_processing_pil_rt_detr import RTDetrImageProcessorPil

_BASE = {
    "vision_config": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "patch_size": 32},
    "text_config": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8},
    "projection_dim": 512,
}
"""CLIP ViT-B/32, which a CPU can run."""
_LARGE = {
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 14,
    },
    "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "projection_dim": 768,
}
"""CLIP ViT-L/14: of flow_grpo's CLIP score, and of LAION's aesthetic predictor."""
_HUGE = {
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "patch_size": 14,
    },
    "text_config": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    "projection_dim": 1024,
}
"""CLIP ViT-H/14: of PickScore_v1 and HPSv2."""
_HEAD = (768, 1024, 128, 64, 16, 1)
"""Widths of LAION's improved-aesthetic-predictor."""
_OBJECTS = ["dog", *(f"class {number}" for number in range(1, 80))]
"""Names of classes, as many as COCO has."""


def settings_of(scorer: str, folder: Path) -> dict[str, Any]:
    """Settings of a scorer, with its checkpoints in a folder; "clip-base" is `clip` with a smaller one."""
    if scorer == "geneval":
        return {"model": _save_detector(folder / "detector"), "clip": _save_clip(folder / "clip", _LARGE)}
    size = {"clip-base": _BASE, "clip": _LARGE, "aesthetic": _LARGE}.get(scorer, _HUGE)
    made = {"model": _save_clip(folder / "clip", size)}
    return made | {"head": _save_head(folder / "head.safetensors")} if scorer == "aesthetic" else made


def _save_clip(folder: Path, size: Mapping[str, Any]) -> str:
    """Saves a CLIP model with a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"{letter}</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={token: place for place, token in enumerate(tokens)}, merges=[])
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = CLIPConfig(**{**size, "text_config": {**size["text_config"], **special}})
    CLIPModel(config).save_pretrained(folder)
    CLIPProcessor(CLIPImageProcessorPil(), tokenizer).save_pretrained(folder)
    return str(folder)


def _save_head(path: Path) -> str:
    layers: dict[str, torch.Tensor] = {}
    for number, (inputs, outputs) in enumerate(pairwise(_HEAD)):
        layers[f"layers.{number}.weight"] = torch.randn(outputs, inputs) / inputs**0.5
        layers[f"layers.{number}.bias"] = torch.zeros(outputs)
    save_file(layers, path)
    return str(path)


def _save_detector(folder: Path) -> str:
    """RT-DETR with ResNet-50."""
    labels = dict(enumerate(_OBJECTS))
    config = RTDetrConfig(id2label=labels, label2id={name: label for label, name in labels.items()})
    RTDetrForObjectDetection(config).save_pretrained(folder)
    RTDetrImageProcessorPil(size={"height": 640, "width": 640}).save_pretrained(folder)
    return str(folder)
