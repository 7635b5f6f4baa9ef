"""Make a base model of composition: render scenes, train autoencoder and transformer, save, print the hash.

    python -m recipes.composition.pretrain --world full --output runs/composition_full
    python -m recipes.composition.pretrain --world small --output recipes/composition/model

The small world's takes 7 minutes of an H100 (264 of the transformer's steps a second); the others' transformer takes
93 steps a second on an H200. A share of the captions is wrong or silent, as the web's are: that deficit is what
reinforcement learning is to repair. `--flawed-share 0` makes the model that shows the ceiling.

The number of steps, not time, bounds training, seeds are fixed and kernels deterministic: the same command on the same
kind of GPU with the same libraries prints the same hash. The output is a diffusers folder with fp16 weights that
`QwenImagePipeline.from_pretrained` loads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImagePipeline
from torch import Tensor

from flowfleet.models.loading import ALL_COMPONENTS, load_pipeline
from recipes.composition import captions
from recipes.composition.base.autoencoder import encode_pixels, fidelity, train_autoencoder
from recipes.composition.base.components import FULL, SMALL, ModelSize, build_pipeline, num_parameters
from recipes.composition.base.flow import FlowRecipe, Pictures, pictures_of, train_transformer
from recipes.composition.base.training import Recipe, prepared
from recipes.composition.render import render
from recipes.composition.scenes import choose, draw
from recipes.composition.world import WORLDS, World
from recipes.tiny.painting import TOKEN_EDGE, contact_sheet, paint

logger = logging.getLogger(__name__)

RENDER_BATCH, RENDER_EDGE = 4096, 128
"""Scenes that are rendered at once, in pictures of this edge or less; of larger ones as many pixels."""
WEIGHTS = ("text_encoder", "transformer", "vae")
NUM_SHOWN, SHOWN_COLUMNS = 64, 8
NUM_SAMPLING_STEPS = 10


@dataclass(frozen=True)
class Plan:
    """What a world's base is made of and how long it trains."""

    size: ModelSize
    autoencoder: Recipe
    autoencoder_batch: int
    autoencoder_pictures: int
    transformer: FlowRecipe
    pictures: int
    flawed_share: float = 0.35
    """Share of captions that are wrong or silent."""


PLANS = {
    "small": Plan(
        SMALL, Recipe(3000, rate=2e-3, cooldown=0.8), 128, 40_000, FlowRecipe(80_000, rate=1.5e-3), pictures=300_000
    ),
    "medium": Plan(
        FULL,
        Recipe(2000, rate=1.5e-3, cooldown=0.8),
        64,
        40_000,
        FlowRecipe(52_000, rate=8e-4),
        pictures=400_000,
        flawed_share=0.2,
    ),
    "full": Plan(
        FULL, Recipe(3000, rate=1.5e-3, cooldown=0.8), 64, 40_000, FlowRecipe(60_000, rate=8e-4), pictures=400_000
    ),
}
"""What `--world` names."""


def make(
    world: World,
    plan: Plan,
    seed: int,
    device: torch.device,
    *,
    compiled: bool,
    larger: World | None = None,
) -> Any:
    """Render and train; returns the pipeline, its weights rounded to fp16 but held in fp32. `larger`: the world in
    larger pictures, which it also learns to draw."""
    torch.manual_seed(seed)
    pipeline = build_pipeline(plan.size, captions.words(world)).to(device)
    pipeline.set_progress_bar_config(disable=True)
    for name in WEIGHTS:
        logger.info("%s: %.2f M parameters", name, num_parameters(getattr(pipeline, name)) / 1e6)

    clock = _Clock()
    few = _drawn(world, plan.autoencoder_pictures, seed + 1, device)
    wide = None if larger is None else _drawn(larger, plan.autoencoder_pictures, seed + 1, device)
    clock.log("rendered %d scenes for the autoencoder", len(few))
    train_autoencoder(pipeline.vae, few, plan.autoencoder, plan.autoencoder_batch, wide)
    del few, wide
    fresh, _ = next(rendered(world, NUM_SHOWN, 0.0, seed + 4, device))
    clock.log("autoencoder trained: PSNR %.1f dB on fresh scenes", fidelity(pipeline.vae, fresh))

    pictures = scenes_to_learn(pipeline, world, plan.pictures, plan.flawed_share, seed + 2, device)
    about = "rendered and encoded %d scenes, and %d distinct captions of %d tokens at most"
    clock.log(about, plan.pictures, *pictures.mask.shape)
    more = None
    if larger is not None:
        scenes = scenes_to_learn(pipeline, larger, plan.pictures, plan.flawed_share, seed + 5, device)
        more = scenes, grid_of(larger)
        clock.log("as many at %d pixels", larger.size)

    train_transformer(pipeline, pictures, grid_of(world), plan.transformer, compiled=compiled, larger=more)
    clock.log("transformer trained")
    return pipeline


def scenes_to_learn(
    pipeline: Any, world: World, num: int, flawed_share: float, seed: int, device: torch.device
) -> Pictures:
    """`rendered` scenes, encoded for `train_transformer`."""
    latents, texts = list[Tensor](), list[str]()
    for pixels, words in rendered(world, num, flawed_share, seed, device):
        latents.append(encode_pixels(pipeline.vae, pixels).to(stored_dtype(device)))
        texts += words
    return pictures_of(pipeline, torch.cat(latents), texts, stored_dtype(device))


def grid_of(world: World) -> tuple[int, int]:
    """Rows and columns of a picture's tokens."""
    return world.size // TOKEN_EDGE, world.size // TOKEN_EDGE


def rendered(
    world: World, num: int, flawed_share: float, seed: int, device: torch.device
) -> Iterator[tuple[Tensor, list[str]]]:
    """Batches of training scenes: pixels (B, 3, S, S) uint8 on `device` and captions, `flawed_share` of them flawed."""
    generator = torch.Generator().manual_seed(seed)
    batch = RENDER_BATCH * RENDER_EDGE**2 // max(world.size, RENDER_EDGE) ** 2
    for start in range(0, num, batch):
        scenes = draw(world, min(batch, num - start), generator)
        texts = captions.flawed(world, scenes, flawed_share, generator)
        yield (render(world, scenes, device) * 255).round().to(torch.uint8), texts


def _drawn(world: World, num: int, seed: int, device: torch.device) -> Tensor:
    """`rendered` scenes without their captions, (N, 3, S, S) uint8."""
    return torch.cat([pixels for pixels, _ in rendered(world, num, 0.0, seed, device)])


def save(pipeline: Any, folder: Path) -> str:
    """Write the diffusers folder with fp16 weights; returns `weights_hash` of it."""
    pipeline.to(torch.float16).save_pretrained(folder, safe_serialization=True)
    return weights_hash(folder)


def weights_hash(folder: Path) -> str:
    """SHA-256 over the weight files of text encoder, transformer and autoencoder, in this order."""
    total = hashlib.sha256()
    for component in WEIGHTS:
        for file in sorted((folder / component).glob("*.safetensors")):
            total.update(file.read_bytes())
    return total.hexdigest()


def load(folder: Path, device: torch.device) -> Any:
    """The pipeline in `folder` as a job loads it, in fp32."""
    pipeline = load_pipeline(
        QwenImagePipeline, folder, dtype=torch.float32, device=str(device), components=ALL_COMPONENTS
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def show(pipeline: Any, world: World, guidance_scale: float, seed: int, file: Path) -> None:
    """Write pictures of the first captions of held-out scenes to a PNG, the captions with the suffix .txt."""
    scenes = choose(world, NUM_SHOWN, torch.Generator().manual_seed(seed + 3), split="seen")
    prompts = captions.caption(world, scenes)
    images = paint(
        pipeline, prompts, image_size=world.size, num_steps=NUM_SAMPLING_STEPS, guidance_scale=guidance_scale
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(images, scale=1, num_columns=SHOWN_COLUMNS).save(file)
    file.with_suffix(".txt").write_text("\n".join(prompts) + "\n")


def stored_dtype(device: torch.device) -> torch.dtype:
    """What latents and embeddings are kept in for training."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class _Clock:
    """Logs what was done with the seconds since the last line."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def log(self, text: str, *args: object) -> None:
        now = time.perf_counter()
        logger.info(text + " in %.1f s", *args, now - self._last)
        self._last = now


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=WORLDS, required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--flawed-share", type=float, help="share of captions that are wrong or silent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, help="edge of its pictures, in place of the world's")
    parser.add_argument("--larger", type=int, help="edge of larger pictures that it learns to draw too, such as 128")
    parser.add_argument("--pictures", type=int, help="scenes that the transformer learns from")
    parser.add_argument("--autoencoder-pictures", type=int, help="scenes that the autoencoder learns from")
    parser.add_argument("--autoencoder-steps", type=int)
    parser.add_argument("--autoencoder-batch", type=int, help="pictures of one of the autoencoder's steps")
    parser.add_argument("--steps", type=int, help="of the transformer")
    parser.add_argument("--batch", type=int, help="pictures of one of the transformer's steps")
    parser.add_argument("--rate", type=float, help="learning rate of the transformer")
    parser.add_argument("--blocks", type=int, help="of the transformer")
    parser.add_argument("--heads", type=int, help="of the transformer")
    parser.add_argument("--no-compile", action="store_true", help="leave the transformer's blocks uncompiled")
    parser.add_argument("--sheet", type=Path, help="write pictures of the finished model to this PNG")
    parser.add_argument("--guidance", type=float, default=1.0, help="guidance scale of the sheet")
    return parser.parse_args(arguments)


def worlds_of(options: argparse.Namespace) -> tuple[World, World | None]:
    """The world, and the same in larger pictures or None."""
    world = World.named(options.world)
    if options.size:
        world = World.of(options.size, world.nouns)
    return world, World.of(options.larger, world.nouns) if options.larger else None


def plan_of(options: argparse.Namespace) -> Plan:
    """The world's plan, changed as the options say."""
    plan = PLANS[options.world]
    size = {"num_blocks": options.blocks, "num_heads": options.heads}
    transformer = {"num_steps": options.steps, "batch_size": options.batch, "rate": options.rate}
    autoencoder = {"num_steps": options.autoencoder_steps}
    return replace(
        plan,
        size=replace(plan.size, **_given(size)),
        autoencoder=replace(plan.autoencoder, **_given(autoencoder)),
        transformer=replace(plan.transformer, **_given(transformer)),
        **_given(
            {
                "autoencoder_batch": options.autoencoder_batch,
                "autoencoder_pictures": options.autoencoder_pictures,
                "pictures": options.pictures,
                "flawed_share": options.flawed_share,
            }
        ),
    )


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


@prepared()
def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    options, started = parse_options(), time.perf_counter()
    device = torch.device(options.device)
    compiled = device.type == "cuda" and not options.no_compile
    world, larger = worlds_of(options)
    pipeline = make(world, plan_of(options), options.seed, device, compiled=compiled, larger=larger)
    result = {"output": str(options.output), "sha256": save(pipeline, options.output)}
    if options.sheet is not None:
        show(load(options.output, device), world, options.guidance, options.seed, options.sheet)
    print(json.dumps(result | {"seconds": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
