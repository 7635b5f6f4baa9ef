"""A checkpoint folder of Qwen-Image at its real size without weights, for jobs with `model.load_format = "dummy"`.

    python -m recipes.full_size.make_model DIRECTORY [--layers N] [--tiny]

Configurations are those of the real model: a transformer of 20.4 B parameters, the text encoder of Qwen2.5-VL-7B, the
autoencoder and the scheduler. The tokenizer is the tiny model's: the template's words are one token each, all else is
bytes. `prompts.txt` holds prompts whose embeddings are 128 tokens long, each with four letters to write in quotes.
"""

import argparse
import json
import random
import string
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

from recipes.tiny.components import build_scheduler, build_tokenizer, text_encoder_config

PROMPTS = "prompts.txt"
TEXT_TOKENS = 128
TEMPLATE_END = 5
"""Tokens of the template after the prompt, which stay: <|im_end|>, line end, <|im_start|>, assistant, line end."""
NUM_PROMPTS = 512


def write_checkpoint(directory: Path, *, num_layers: int | None = None, tiny: bool = False) -> Path:
    """Writes the folder and returns it. `tiny` keeps every part and shrinks it; `num_layers`: of the transformer."""
    directory.mkdir(parents=True, exist_ok=True)
    about = json.loads(Path(__file__).with_name("qwen_image.json").read_text())
    sizes, classes = about["tiny" if tiny else "real"], about["classes"]
    layers = {} if num_layers is None else {"num_layers": num_layers}
    with torch.device("meta"):
        parts: dict[str, Any] = {
            "transformer": QwenImageTransformer2DModel(**sizes["transformer"] | layers),
            "vae": AutoencoderKLQwenImage(**sizes["vae"]),
        }
    parts["scheduler"] = build_scheduler()
    for name, part in parts.items():
        part.save_config(directory / name)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(directory / "tokenizer")
    config = text_encoder_config(tokenizer, sizes["text"], sizes["vision"], tie_word_embeddings=False)
    config.architectures = [classes["text_encoder"][1]]
    config.save_pretrained(directory / "text_encoder")
    index = {"_class_name": "QwenImagePipeline", "_diffusers_version": diffusers.__version__, **classes}
    (directory / "model_index.json").write_text(json.dumps(index, indent=2))
    prompts = make_prompts(tokenizer, NUM_PROMPTS, TEXT_TOKENS - TEMPLATE_END)
    (directory / PROMPTS).write_text("\n".join(prompts) + "\n")
    return directory


def make_prompts(tokenizer: Any, count: int, num_tokens: int, seed: int = 0) -> list[str]:
    """Different prompts of this many tokens each: words of the recipe's kind, then filler to the length."""
    draw = random.Random(seed)
    return [_prompt(tokenizer, "".join(draw.choices(string.ascii_uppercase, k=4)), num_tokens) for _ in range(count)]


def _prompt(tokenizer: Any, word: str, num_tokens: int) -> str:
    start = f'A sign that says "{word}" in '
    missing = num_tokens - len(tokenizer(start).input_ids)
    prompt = start + ("v" * missing)
    assert len(tokenizer(prompt).input_ids) == num_tokens
    return prompt


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.full_size.make_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, help="transformer blocks (60)")
    parser.add_argument("--tiny", action="store_true", help="the same parts, shrunk, for tests on a laptop")
    options = parser.parse_args()
    print(write_checkpoint(options.directory, num_layers=options.layers, tiny=options.tiny))


if __name__ == "__main__":
    main()
