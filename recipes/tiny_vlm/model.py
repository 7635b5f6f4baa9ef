"""A Qwen2.5-VL of the real class, small enough for a CPU: random weights, a tokenizer and a picture processor.

Patches of 8 pixels, of which the model merges four into one token, so that a picture of 64 × 64 is 16 tokens and one of
128 × 128 is 64. The tokenizer has the real special tokens and chat template, words of a judge's questions as one token
each, and bytes for all else, so that it encodes any text. "yes" and "no", with and without a space or a capital, and
the digits are one token each, as in the real vocabulary; "10" is two. Untrained, its answers mean nothing.

    python -m recipes.tiny_vlm.model --output runs/tiny_vlm
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from recipes.tiny.components import SIGN_WORDS, text_encoder_config, train_tokenizer

SIZES: dict[str, Any] = json.loads(Path(__file__).with_name("sizes.json").read_text())
PATCH_SIZE, MERGE_SIZE = SIZES["vision"]["patch_size"], SIZES["vision"]["spatial_merge_size"]
MIN_SIDE, MAX_SIDE = 64, 128
"""Pictures are scaled to between 64 × 64 and 128 × 128 pixels together."""

IMAGE_TOKEN = "<|image_pad|>"

WORDS = (
    "system\nYou are a careful judge of pictures. Answer with one word, with a number only.\nuser\nassistant\n"
    "Does this picture show? Is the text in it legible, exactly as in the prompt, and nothing else? Please answer Yes "
    "or No. How well does the picture follow the prompt? Rate it on a scale from to where is worst and best. Which is "
    "better, first or second? Output only the text. yes no yes no Yes No A B A B 0 1 2 3 4 5 6 7 8 9"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5-VL's, without the numbering of pictures and the default system text."""


def make_tiny_vlm(path: Path | str, seed: int = 0) -> Path:
    """Writes model, tokenizer and picture processor to the folder `path`; equal seeds give equal bytes."""
    tokenizer = build_tokenizer()
    size = {"shortest_edge": MIN_SIDE**2, "longest_edge": MAX_SIDE**2}
    processor = Qwen2VLImageProcessorPil(patch_size=PATCH_SIZE, merge_size=MERGE_SIZE, size=size)
    TinyVlm(build_model(tokenizer, seed), tokenizer, processor).save(path)
    return Path(path)


def build_tokenizer() -> Any:
    """A byte-level BPE; every word of `WORDS`, with the space before it if it has one, is one token."""
    tokenizer = train_tokenizer([WORDS, SIGN_WORDS, "\n".join(WORDS.split())], vocab_size=4000)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: Any, seed: int) -> Any:
    """Three layers of width 128 behind two vision blocks of width 64, untrained, fp32."""
    config = text_encoder_config(tokenizer, SIZES["text"], SIZES["vision"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2_5_VLForConditionalGeneration(config).eval()


@dataclass(frozen=True)
class TinyVlm:
    """A loaded checkpoint. `encode` makes the model's inputs of a conversation: what training and serving share."""

    model: Any
    tokenizer: Any
    image_processor: Any

    @classmethod
    def load(cls, path: Path | str) -> TinyVlm:
        """From a folder that `make_tiny_vlm`, or `save` after training, wrote."""
        return cls(
            Qwen2_5_VLForConditionalGeneration.from_pretrained(path, use_safetensors=True).eval(),
            Qwen2Tokenizer.from_pretrained(path),
            Qwen2VLImageProcessorPil.from_pretrained(path),
        )

    def save(self, path: Path | str) -> None:
        """Saves the model as a Hugging Face folder."""
        for part in (self.model, self.tokenizer, self.image_processor):
            part.save_pretrained(path)

    def encode(
        self, messages: Sequence[dict[str, Any]], pictures: Sequence[Image.Image], answer: str | None = None
    ) -> dict[str, torch.Tensor]:
        """Inputs of the model's forward for one conversation.

        messages: as in the OpenAI API; each part that is not text stands for the next picture (RGB).
        answer: what the assistant says, appended with its end; without one the inputs end where it is to begin.

        Returns input_ids, attention_mask and mm_token_type_ids (1, S) int64 and, with pictures, pixel_values
        (patches, 3·2·8·8) fp32 and image_grid_thw (pictures, 3).
        """
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        media = dict(self.image_processor(images=list(pictures), return_tensors="pt")) if pictures else {}
        parts = text.split(IMAGE_TOKEN)
        if len(parts) != len(pictures) + 1:
            raise ValueError(f"{len(pictures)} pictures for {len(parts) - 1} places in the conversation")
        counts = [int(grid.prod()) // MERGE_SIZE**2 for grid in media.get("image_grid_thw", [])]
        text = parts[0] + "".join(IMAGE_TOKEN * count + part for count, part in zip(counts, parts[1:], strict=True))
        ids = self.tokenizer(text + (f"{answer}<|im_end|>" if answer is not None else ""), return_tensors="pt")
        types = (ids["input_ids"] == self.model.config.image_token_id).long()
        return {
            "input_ids": ids["input_ids"],
            "attention_mask": ids["attention_mask"],
            "mm_token_type_ids": types,
            **media,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(make_tiny_vlm(options.output, options.seed))


if __name__ == "__main__":
    main()
