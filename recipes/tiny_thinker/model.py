"""Makes a tiny Thinker that half masters its task: naming the color of a square in a picture.

    python -m recipes.tiny_thinker.model --output runs/tiny_thinker

The architecture, the processors and the chat template are Qwen3-Omni's, the sizes are not. Pre-training gives a wrong
label with probability `WRONG`, so that the model learns to see colors and to answer wrongly about that often;
reinforcement learning then has something to repair.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)

from flowfleet.models.families.qwen3_omni import Qwen3OmniThinkerAdapter
from flowfleet.models.sequences.adapter import Tokens
from flowfleet.models.sequences.prompts import PromptMedia

COLORS: Final = {
    "red": (200, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 70, 200),
    "yellow": (220, 200, 40),
    "black": (20, 20, 20),
    "white": (235, 235, 235),
}
QUESTION: Final = "which color is the square ?"
SIDE: Final = 32
WRONG: Final = 0.5
"""Probability of a wrong label in pre-training."""
_SPECIAL: Final = (
    "<pad>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
    "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>",
)  # fmt: skip
_WORDS: Final = ("user", "assistant", "what", "which", "color", "is", "the", "square", "sound", "in", "film", "?")
_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }} "
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% else %} {{ part.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token per word."""
    vocabulary = {token: place for place, token in enumerate((*_SPECIAL, *_WORDS, *COLORS))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(prefix="")
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": list(_SPECIAL[1:])})
    fast.chat_template = _TEMPLATE
    return fast


def configuration() -> Qwen3OmniMoeThinkerConfig:
    """A Thinker of some 200,000 parameters. The ids of its tokens are their places in `_SPECIAL`."""
    return Qwen3OmniMoeThinkerConfig.from_json_file(Path(__file__).with_name("config.json"))


def save_random(folder: Path, seed: int = 0) -> None:
    """Writes an untrained model with its processors."""
    torch.manual_seed(seed)
    model = Qwen3OmniMoeThinkerForConditionalGeneration(configuration())
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.08)
    model.generation_config.eos_token_id = _SPECIAL.index("<|im_end|>")
    model.save_pretrained(folder)
    save_processors(folder, model.config, {"shortest_edge": SIDE * SIDE, "longest_edge": 4 * SIDE * SIDE})


def save_processors(folder: Path, config: Any, size: dict[str, int]) -> None:
    """Writes the tokenizer, and the processors of sounds, pictures and videos of `size` pixels."""
    tokenizer().save_pretrained(folder)
    sound: Any = WhisperFeatureExtractor(feature_size=config.audio_config.num_mel_bins)
    picture: Any = Qwen2VLImageProcessorPil(patch_size=config.vision_config.patch_size, merge_size=2, size=size)
    both = {**sound.to_dict(), **picture.to_dict()}
    (folder / "preprocessor_config.json").write_text(json.dumps(both, indent=1, sort_keys=True), encoding="utf-8")
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": size}), encoding="utf-8")


def picture(color: str, draw: random.Random) -> Image.Image:
    """A square of about this color, anywhere on a gray ground."""
    ground = draw.randint(90, 150)
    made = np.full((SIDE, SIDE, 3), ground, np.uint8)
    side = draw.randint(14, 24)
    top, left = draw.randint(0, SIDE - side), draw.randint(0, SIDE - side)
    shade = [min(255, max(0, level + draw.randint(-20, 20))) for level in COLORS[color]]
    made[top : top + side, left : left + side] = shade
    return Image.fromarray(made)


def train(folder: Path, steps: int, batch: int = 24, rate: float = 3e-3, wrong: float = WRONG, seed: int = 0) -> float:
    """Pre-trains the model of a folder in place; returns the share of right answers of its greedy policy."""
    adapter = Qwen3OmniThinkerAdapter.load(folder, dtype=torch.float32)
    model = adapter.transformer.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.9 * step / steps)
    draw = random.Random(seed)
    for _ in range(steps):
        rows = [_example(adapter, draw, wrong) for _ in range(batch)]
        loss: Any = -adapter.log_probs(rows, temperature=1.0).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval().requires_grad_(False)
    model.save_pretrained(folder)
    return mean_probability(adapter, random.Random(seed + 1))


def mean_probability(adapter: Qwen3OmniThinkerAdapter, draw: random.Random, count: int = 60) -> float:
    """The mean probability of the right answer on fresh pictures."""
    rows = [_example(adapter, draw, 0.0) for _ in range(count)]
    with torch.no_grad():
        found: Any = adapter.log_probs(rows, temperature=1.0)
    return float(torch.stack([part.sum() for part in found.split([len(row.token_ids) for row in rows])]).exp().mean())


def _example(adapter: Qwen3OmniThinkerAdapter, draw: random.Random, wrong: float) -> Tokens:
    color = draw.choice(list(COLORS))
    shown = PromptMedia("picture", np.asarray(picture(color, draw)))
    said = draw.choice([other for other in COLORS if other != color]) if draw.random() < wrong else color
    prompt = adapter.encode(QUESTION, [shown])
    answer = adapter.processor.tokenizer(said, add_special_tokens=False)["input_ids"]
    return Tokens(prompt, torch.tensor([*answer, *adapter.stop_ids]))


def write_questions(folder: Path, name: str, count: int, seed: int) -> Path:
    """Writes pictures and a prompt file of questions about them, with the right answers."""
    draw = random.Random(seed)
    (folder / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        color = list(COLORS)[number % len(COLORS)]
        file = f"{name}/{number:03d}.png"
        picture(color, draw).save(folder / file)
        lines.append(json.dumps({"prompt": QUESTION, "images": [file], "answer": color}))
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    """Writes model, training questions and held-out questions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=250, help="updates of the pre-training")
    options = parser.parse_args(argv)
    save_random(options.output / "model")
    right = train(options.output / "model", options.steps)
    write_questions(options.output, "train", 120, seed=1)
    write_questions(options.output, "held-out", 96, seed=2)
    print(f"{options.output}: the right answer has a mean probability of {right:.2f}")


if __name__ == "__main__":
    main()
