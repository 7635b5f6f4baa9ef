"""Random tiny detectors, saved as checkpoints: a YOLOS of a fixed set of classes, and an OWL-ViT of any."""

from pathlib import Path

import torch
from transformers import (
    OwlViTConfig,
    OwlViTForObjectDetection,
    PreTrainedModel,
    YolosConfig,
    YolosForObjectDetection,
)
from transformers.models.owlvit.image_processing_pil_owlvit import OwlViTImageProcessorPil
from transformers.models.yolos.image_processing_pil_yolos import YolosImageProcessorPil

from tests.tiny_models.clip import randomize
from tests.tiny_models.text_encoders import make_clip_tokenizer

SIDE = 32
CLASSES = ("N/A", "person", "cat", "mouse")


def save_yolos(folder: Path) -> Path:
    """Eight queries, whose boxes and classes change with the picture."""
    config = YolosConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=[SIDE, SIDE],
        patch_size=8,
        num_detection_tokens=8,
        id2label=dict(enumerate(CLASSES)),
        label2id={name: label for label, name in enumerate(CLASSES)},
    )
    _save(YolosForObjectDetection(config), folder)
    YolosImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    return folder


def save_owlvit(folder: Path) -> Path:
    """Sixteen boxes, and queries of 16 tokens."""
    tokenizer = make_clip_tokenizer()
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 16,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = OwlViTConfig(
        text_config=tower | text, vision_config=tower | {"image_size": SIDE, "patch_size": 8}, projection_dim=16
    )
    _save(OwlViTForObjectDetection(config), folder)
    OwlViTImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _save(model: PreTrainedModel, folder: Path) -> None:
    torch.manual_seed(0)
    randomize(model)
    model.save_pretrained(folder)
