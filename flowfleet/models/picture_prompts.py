"""Prompts with pictures for Qwen2.5-VL as a text encoder: its inputs, and the positions that it is to give them.

transformers' own `Qwen2VLProcessor` cannot be made without torchvision, of which it needs nothing but videos. This one
is its part for pictures, on transformers' image processor in Pillow, so that every machine makes the same numbers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from PIL import Image
from torch import nn
from transformers import BatchFeature, Qwen2VLImageProcessorPil

PICTURE_TOKEN = "<|image_pad|>"


class PictureProcessor:
    """Texts with placeholders and their pictures to the encoder's inputs."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, path: str | Path, tokenizer: Any) -> Self:
        """From the folder `processor` of a checkpoint. Raises ValueError if there is none."""
        processor_class: Any = Qwen2VLImageProcessorPil
        try:
            image_processor = processor_class.from_pretrained(str(path), subfolder="processor", local_files_only=True)
        except OSError as error:
            raise ValueError(f"model {path} has no configuration of its processor: {error}") from error
        return cls(image_processor, tokenizer)

    def __call__(
        self, *, text: Sequence[str], images: Sequence[Image.Image], padding: bool, return_tensors: str
    ) -> BatchFeature:
        """`input_ids` and `attention_mask` (B, L), `pixel_values` (patches of all pictures, numbers of a patch) and
        `image_grid_thw` (pictures, 3), their frames, rows and columns of patches.

        Args:
            text: one PICTURE_TOKEN for each picture, in order over all texts. It becomes one for every token that the
                encoder makes of the picture.
            images: RGB.
            padding: of the texts, to the longest.
            return_tensors: "pt".

        Raises:
            ValueError: other than one placeholder a picture.
        """
        pictures: BatchFeature = self.image_processor(images=list(images), return_tensors=return_tensors)
        tokens = (pictures["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2).tolist()
        texts = _expand(text, tokens)
        return BatchFeature({**self.tokenizer(texts, padding=padding, return_tensors=return_tensors), **pictures})


def _expand(texts: Sequence[str], tokens: Sequence[int]) -> list[str]:
    """The texts with as many placeholders for each picture as it has tokens."""
    if sum(text.count(PICTURE_TOKEN) for text in texts) != len(tokens):
        raise ValueError(f"prompts must not contain {PICTURE_TOKEN}: pictures are put in by the model")
    left = iter(tokens)
    return [
        "".join(piece + PICTURE_TOKEN * next(left) for piece in text.split(PICTURE_TOKEN)[:-1])
        + text.split(PICTURE_TOKEN)[-1]
        for text in texts
    ]


def tell_pictures_from_text(encoder: nn.Module) -> None:
    """Lets a `Qwen2_5_VLForConditionalGeneration` number the tokens of pictures by row and column, as it was trained.

    transformers 5 does so only if `mm_token_type_ids` marks the pictures' tokens; diffusers' pipelines of
    up to 0.42 do not pass that on, and all tokens are then numbered as if they were text
    (https://github.com/huggingface/diffusers/issues/14194). Where it is missing, this hook derives it from the
    placeholders.
    """
    encoder.register_forward_pre_hook(_add_token_types, with_kwargs=True)


def _add_token_types(
    encoder: Any, positional: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if named.get("mm_token_type_ids") is None and named.get("image_grid_thw") is not None:
        named = named | {"mm_token_type_ids": (named["input_ids"] == encoder.config.image_token_id).int()}
    return positional, named
