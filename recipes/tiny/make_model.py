"""Make the tiny checkpoint: render signs, train autoencoder and transformer, save, load back and evaluate.

    python -m recipes.tiny.make_model --output recipes/tiny/model

takes seven and a half minutes on one H200 with 16 cores. Without a GPU the same number of transformer steps is a matter
of days; the budgets are options (`--help`), and `--num-signs 400 --vae-seconds 8 --transformer-seconds 30
--transformer-batch 32` shows in a few minutes that all runs. Needs the project's extra `local`.

30 % of the captions name another word than their picture, which leaves about half of the signs illegible: that flaw is
what reinforcement learning is to repair. The output is a diffusers folder with fp16 weights that
`QwenImagePipeline.from_pretrained` loads; what the loaded pipeline scores is printed last, for four noises and in the
mean.
"""

import argparse
import functools
import logging
import multiprocessing
from typing import Any

import numpy as np
import torch

from recipes.tiny.components import build_pipeline
from recipes.tiny.evaluation import Judge, Legibility
from recipes.tiny.make_prompts import read_prompts
from recipes.tiny.making import NOISE_SEEDS, mean_over, parser, run
from recipes.tiny.painting import contact_sheet, paint
from recipes.tiny.signs import draw_example, word_in
from recipes.tiny.training import encode_images, train_image_vae, train_transformer

logger = logging.getLogger(__name__)


def render_dataset(num_signs: int, wrong_share: float, held_out: frozenset[str]) -> tuple[torch.Tensor, list[str]]:
    """Pictures (num_signs, 3, 64, 64) uint8 and their captions, drawn by all cores."""
    draw = functools.partial(draw_example, wrong_share=wrong_share, held_out=held_out)
    with multiprocessing.get_context("fork").Pool() as pool:
        examples = pool.map(draw, range(num_signs), chunksize=500)
    pixels = torch.from_numpy(np.stack([example.pixels for example in examples])).permute(0, 3, 1, 2).contiguous()
    return pixels, [example.prompt for example in examples]


def make(options: argparse.Namespace) -> Any:
    """Render, train and return the pipeline, its weights rounded to fp16 but held in fp32."""
    device = torch.device(options.device)
    validation = read_prompts("validation")
    pixels, prompts = render_dataset(options.num_signs, options.wrong_share, frozenset(map(word_in, validation)))
    logger.info("rendered %d signs", len(pixels))
    judge = Judge()
    torch.manual_seed(options.seed)
    pipeline = build_pipeline().to(device)
    pipeline.set_progress_bar_config(disable=True)
    train_image_vae(pipeline.vae, pixels, options.vae_seconds, options.vae_batch)
    latents = encode_images(pipeline.vae, pixels)

    def report() -> None:
        logger.info("so far %s", judge.judge(paint(pipeline, validation[:64]), validation[:64]))

    train_transformer(pipeline, latents, prompts, options.transformer_seconds, options.transformer_batch, report)
    return pipeline


def evaluate(pipeline: Any, options: argparse.Namespace) -> dict[str, Legibility]:
    """Judges the pipeline on the validation prompts; writes the sheet if asked for.

    Keys are the seeds of the noise, then "mean".
    """
    prompts = read_prompts("validation")
    images = {seed: paint(pipeline, prompts, seed) for seed in NOISE_SEEDS}
    if options.sheet is not None:
        contact_sheet(images[NOISE_SEEDS[0]][:32]).save(options.sheet)
    judge = Judge()
    results = {str(seed): judge.judge(pictures, prompts) for seed, pictures in images.items()}
    return results | {"mean": mean_over(list(results.values()))}


def main() -> None:
    vae, transformer = {"vae_seconds": 60.0, "vae_batch": 96}, {"transformer_seconds": 310.0, "transformer_batch": 1024}
    run(parser(__doc__, num_signs=300_000, **vae, **transformer).parse_args(), make, evaluate)


if __name__ == "__main__":
    main()
