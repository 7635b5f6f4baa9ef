"""Bare diffusers for comparison: QwenImagePipeline's own call, eager, with text encoder and VAE; nothing is stored."""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from typing import Any

import torch

from bench.speed.full_size import PROMPTS
from flowfleet.hardware import devices
from flowfleet.models.registry import family_of
from flowfleet.weights.weights import dtype_of


def run_bare(options: argparse.Namespace, num_calls: int) -> dict[str, Any]:
    """Figures of calls of one prompt and `batch` pictures of it, the first `warm_up` left out. `options`: see
    `bench.speed.rollout`."""
    device = devices.pick_device() if options.device == "auto" else torch.device(options.device)
    adapter = (
        family_of(options.model)
        .load()
        .load(options.model, dtype=dtype_of(options.dtype), device=device, load_format="dummy")
    )
    pipeline: Any = adapter.pipeline
    pipeline.set_progress_bar_config(disable=True)
    prompts = (options.model / PROMPTS).read_text().splitlines()
    guided = {"true_cfg_scale": options.guidance, "negative_prompt": " "} if options.guidance > 1 else {}
    ended = [time.perf_counter()]
    for number in range(num_calls):
        made = pipeline(
            prompt=prompts[number % len(prompts)],
            num_images_per_prompt=options.batch,
            num_inference_steps=options.steps,
            height=options.size,
            width=options.size,
            **(guided or {"true_cfg_scale": 1.0}),
        )
        assert len(made.images) == options.batch
        ended.append(time.perf_counter())
    gaps = [after - before for before, after in pairwise(ended[options.warm_up :])]
    rates = [options.batch / seconds for seconds in gaps]
    return {
        "images_per_s": statistics.median(rates),
        "images_per_s_each": [round(rate, 3) for rate in rates],
        "peak_gib": devices.peak_memory_bytes(device) / 2**30,
    }
