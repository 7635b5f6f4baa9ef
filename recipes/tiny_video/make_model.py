"""Make the tiny video checkpoint: render films, train autoencoder and transformer, save, load back and evaluate.

    python -m recipes.tiny_video.make_model --output recipes/tiny_video/model

takes under four minutes on one H200. `--device cpu --num-films 200 --vae-seconds 10 --vae-batch 4
--transformer-seconds 10 --transformer-batch 4` shows in half a minute that all runs. Needs the project's extra `local`.

A share of the captions names another direction than their film, so that the model often moves its shapes the wrong
way: that flaw is what reinforcement learning is to repair. The output is a diffusers folder with fp16 weights that
`WanPipeline.from_pretrained` loads; what the loaded pipeline scores on the held-out prompts is printed last, for four
noises and in the mean.
"""

import argparse
import logging
from typing import Any

import torch

from recipes.tiny.making import NOISE_SEEDS, mean_over, parser, run
from recipes.tiny.training import LATENT_BATCH
from recipes.tiny_video.clips import TRAIN_CLIPS, draw_films
from recipes.tiny_video.components import build_pipeline
from recipes.tiny_video.evaluation import Obedience, contact_sheet, film, judge
from recipes.tiny_video.make_prompts import read_prompts
from recipes.tiny_video.training import encode_films, fidelity, train_film_vae, train_transformer

logger = logging.getLogger(__name__)


def make(options: argparse.Namespace) -> Any:
    """Render, train and return the pipeline, its weights rounded to fp16 but held in fp32."""
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    films = draw_films(options.num_films, options.wrong_share, options.seed, device)
    prompts, validation = [clip.prompt for clip in TRAIN_CLIPS], read_prompts("validation")
    logger.info("rendered %d films", len(films.pixels))
    pipeline = build_pipeline().to(device)
    pipeline.set_progress_bar_config(disable=True)
    train_film_vae(pipeline.vae, films.pixels, options.vae_seconds, options.vae_batch)
    logger.info("the autoencoder keeps films at %.1f dB", fidelity(pipeline.vae, films.pixels[:LATENT_BATCH]))
    latents = encode_films(pipeline.vae, films.pixels)

    def report() -> None:
        logger.info("so far %s", judge(film(pipeline, validation), validation))

    seconds, batch_size = options.transformer_seconds, options.transformer_batch
    train_transformer(pipeline, latents, films.captions, prompts, seconds, batch_size, report)
    return pipeline


def evaluate(pipeline: Any, options: argparse.Namespace) -> dict[str, Obedience]:
    """Judges the pipeline on the held-out prompts; writes the sheet if asked for.

    Keys are the seeds of the noise, then "mean"; "trained" is the first noise on as many prompts of the training set.
    """
    prompts, trained = read_prompts("validation"), read_prompts("train")
    films = {seed: film(pipeline, prompts, seed) for seed in NOISE_SEEDS}
    if options.sheet is not None:
        contact_sheet(films[NOISE_SEEDS[0]][:24]).save(options.sheet)
    results = {str(seed): judge(frames, prompts) for seed, frames in films.items()}
    known = trained[: len(prompts)]
    results["mean"] = mean_over(list(results.values()))
    return results | {"trained": judge(film(pipeline, known), known)}


def main() -> None:
    vae, transformer = {"vae_seconds": 75.0, "vae_batch": 64}, {"transformer_seconds": 100.0, "transformer_batch": 512}
    run(parser(__doc__, num_films=60_000, **vae, **transformer).parse_args(), make, evaluate)


if __name__ == "__main__":
    main()
