"""Teach a tiny FLUX.1 Kontext to keep a picture of two halves, or to swap them, as the prompt says.

    python -m recipes.tiny_taught.edit --base runs/random-edit --output runs/tiny-edit

Which half ends bright depends on the prompt and on the condition image together: neither alone says anything of it. The
autoencoder is taught first, then the right edits, then right ones among wrong ones.
"""

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flowfleet.media.files import encode_media
from flowfleet.models.families.flux_kontext import FluxKontextAdapter
from flowfleet.models.settings import Size
from recipes.tiny.training import train_vae
from recipes.tiny_taught.teaching import BATCH_SIZE, Lesson, options, teach, write_prompts

SIDE = 32
PROMPTS = ("Keep the picture", "Swap the halves")
NUM_PICTURES = 2048
NUM_LINES = {"train": 128, "validation": 256}
MAX_TOKENS = 16
VAE_BATCH = 16


def draw_pictures(count: int) -> Tensor:
    """(count, SIDE, SIDE, 3) uint8: one half bright, the other dark, both with a tint."""
    bright, dark = 0.7 + 0.25 * torch.rand(count, 3), 0.05 + 0.25 * torch.rand(count, 3)
    is_left = torch.rand(count, 1) < 0.5
    halves = torch.stack([torch.where(is_left, bright, dark), torch.where(is_left, dark, bright)], 1)
    rows = halves.repeat_interleave(SIDE // 2, 1)[:, None].expand(-1, SIDE, -1, -1)
    return (rows * 255).round().to(torch.uint8)


def main() -> None:
    chosen = options(__doc__, 0.3, vae=15.0, right=20.0, mixed=12.0)
    adapter = FluxKontextAdapter.load(chosen.base, dtype=torch.float32)
    pictures, size = draw_pictures(NUM_PICTURES), Size(SIDE, SIDE)
    adapter = _with_taught_vae(adapter, pictures, chosen.vae_seconds)
    adapter.limit_tokens(MAX_TOKENS)
    adapter.resize_conditions(SIDE**2)
    before = adapter.encode_media(pictures[:, None], size)
    edits = torch.stack([before, adapter.encode_media(pictures.roll(SIDE // 2, 2)[:, None], size)])
    prompts = adapter.encode(PROMPTS, images=[[Image.new("RGB", (SIDE, SIDE))]] * len(PROMPTS))
    grid = prompts.extras["image_1"].shape[1:]

    def draw(wrong_share: float) -> Lesson:
        rows, asked = torch.randint(NUM_PICTURES, (BATCH_SIZE,)), torch.randint(2, (BATCH_SIZE,))
        done = asked ^ (torch.rand(BATCH_SIZE) < wrong_share).long()
        texts = prompts.select(asked)
        return edits[done, rows], replace(texts, extras={**texts.extras, "image_1": before[rows].reshape(-1, *grid)})

    teach(adapter, lambda: draw(0.0), size, chosen.right_seconds)
    teach(adapter, lambda: draw(chosen.wrong_share), size, chosen.mixed_seconds)
    adapter.pipeline.save_pretrained(chosen.output / "model")
    for name, count in NUM_LINES.items():
        write_prompts(chosen.output, name, list(_lines(chosen.output, name, count)), "source")


def _with_taught_vae(adapter: FluxKontextAdapter, pictures: Tensor, seconds: float) -> FluxKontextAdapter:
    pixels = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
    adapter.vae.requires_grad_(True)
    train_vae(adapter.vae, lambda: pixels[torch.randint(len(pixels), (VAE_BATCH,))], seconds, recorded=False)
    adapter.vae.requires_grad_(False)
    modes = adapter.vae.encode(pixels).latent_dist.mode()
    adapter.vae.register_to_config(scaling_factor=1 / modes.std().item(), shift_factor=modes.mean().item())
    return FluxKontextAdapter(adapter.pipeline, dict(adapter.vae.config), dtype=adapter.dtype, device=adapter.device)


def _lines(folder: Path, name: str, count: int) -> Iterator[dict[str, Any]]:
    """Writes pictures that no lesson had, and yields their lines, half of each prompt."""
    for number, frame in enumerate(draw_pictures(count).numpy()):
        data, media_type = encode_media(frame[None], fps=1)
        path = f"{name}-{number}.png"
        (folder / path).write_bytes(data)
        source = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
        yield {"prompt": PROMPTS[number % 2], "images": [path], "source": source}


if __name__ == "__main__":
    main()
