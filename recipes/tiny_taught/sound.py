"""Teach a tiny LTX-2 to make loud or quiet sounds, as the prompt says.

    python -m recipes.tiny_taught.sound --base runs/random-sound --output runs/tiny-sound

The decoder of sounds is taught first: latents around 1 become a loud sound, those around -1 a quiet one. Then the
transformer learns to make the right one, and at last either, the right one for most prompts. Pictures are blank.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flowfleet.models.families.ltx2 import LTX2Adapter
from flowfleet.models.settings import Size
from recipes.tiny.training import Budget, Learner
from recipes.tiny_taught.teaching import BATCH_SIZE, Lesson, options, teach, write_prompts

SIZE = Size(32, 32, 9)
LOUD_DB, QUIET_DB = -10.0, -40.0
WAYS = {"loud": LOUD_DB, "quiet": QUIET_DB}
THINGS = {
    "train": ("bell", "drum", "dog", "engine", "horn", "train", "voice", "wave", "cow", "bus", "bee", "gong", "harp"),
    "validation": ("cat", "door", "bird", "river", "choir", "clock", "plane", "saw"),
}
"""Nothing of the second list is in a lesson, or in a prompt of training."""
NUM_LINES = {"train": 52, "validation": 256}
MAX_TOKENS = 16
DECODER_BATCH = 16
DECODER_RATE = 3e-3
SPREAD = 0.15
"""Deviation of a sound's latents from their mean."""


def main() -> None:
    chosen = options(__doc__, 0.3, decoder=12.0, right=45.0, mixed=15.0)
    adapter = LTX2Adapter.load(chosen.base, dtype=torch.float32)
    adapter.limit_tokens(MAX_TOKENS)
    _teach_decoder(adapter, chosen.decoder_seconds)
    texts = [_prompt(way, thing) for way in WAYS for thing in THINGS["train"]]
    prompts, (num_picture, num_sound) = adapter.encode(texts), adapter.part_lengths(SIZE)

    def draw(wrong_share: float) -> Lesson:
        asked = torch.randint(len(texts), (BATCH_SIZE,))
        is_loud = (asked < len(texts) // 2) ^ (torch.rand(BATCH_SIZE) < wrong_share)
        sound = torch.where(is_loud, 1.0, -1.0)[:, None] + SPREAD * torch.randn(BATCH_SIZE, num_sound)
        return torch.cat([torch.zeros(BATCH_SIZE, num_picture), sound], 1), prompts.select(asked)

    teach(adapter, lambda: draw(0.0), SIZE, chosen.right_seconds)
    teach(adapter, lambda: draw(chosen.wrong_share), SIZE, chosen.mixed_seconds)
    adapter.pipeline.save_pretrained(chosen.output / "model")
    for name, count in NUM_LINES.items():
        write_prompts(chosen.output, name, list(_lines(name, count)), "loudness")


def _prompt(way: str, thing: str) -> str:
    return f"A {way} {thing}"


def _teach_decoder(adapter: LTX2Adapter, seconds: float) -> None:
    sounding = torch.nn.ModuleList([adapter.pipeline.audio_vae.decoder, adapter.pipeline.vocoder]).requires_grad_(True)
    length, middle, half = adapter.part_lengths(SIZE)[1], (LOUD_DB + QUIET_DB) / 2, (LOUD_DB - QUIET_DB) / 2

    def loss() -> Tensor:
        code = 1.3 * (2 * torch.rand(DECODER_BATCH, 1) - 1)
        waves = adapter.waves(code + 2 * SPREAD * torch.randn(DECODER_BATCH, length), SIZE)
        return ((_level_db(waves) - middle) / half - code[:, 0].clamp(-1.2, 1.2)).square().mean()

    learner, budget = Learner(sounding, loss, recorded=False), Budget(seconds)
    while budget.progress < 1:
        learner.step(DECODER_RATE * min(1.0, 2 - 2 * budget.progress))
        budget.step()
    sounding.requires_grad_(False)


def _level_db(waves: Tensor) -> Tensor:
    """(B,) level in dB below full scale of the channels' mean, as the scorer `loudness` hears it."""
    return 10 * torch.log10(waves.mean(1).square().mean(1) + 1e-10)


def _lines(name: str, count: int) -> Iterator[dict[str, Any]]:
    ways = list(WAYS)
    for number in range(count):
        way, thing = ways[number % 2], THINGS[name][number // 2 % len(THINGS[name])]
        yield {"prompt": _prompt(way, thing), "loudness": str(WAYS[way])}


if __name__ == "__main__":
    main()
