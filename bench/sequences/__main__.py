"""Measures how fast a policy that writes text samples and trains, at the real width of Qwen3-Omni's Thinker on one GPU.

    python -m bench.sequences [--engine transformers|vllm] [--layers N]
    python -m bench.sequences --tiny

Two stages, each in a process of its own, on random weights that are drawn on the device:

rollout   the engine samples questions with a picture, with the trainer's adapter in it
train     the trainer's own step on these sequences: GSPO, LoRA, packed rows; then the gap of log-probs between trainer
          and rollout, with the rollout's choice of experts and with the model's own

`--layers` is as many as leave half of the device's memory free, at most 48. Medians are over `--steps` requests and
steps after a warm-up.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import report
from bench.sequences import stages
from recipes.full_size.make_thinker import BYTES_OF_LAYER, BYTES_OF_REST, NUM_LAYERS, write_folder

SETTINGS = ("engine", "dtype", "layers", "rows", "group", "prompt", "tokens", "micro_batch_tokens")
REAL: dict[str, Any] = {"rows": 128, "group": 16, "prompt": 256, "tokens": 192, "pixels": 448}
REAL |= {"micro_batch_tokens": 8192, "dtype": "bfloat16"}
TINY: dict[str, Any] = {"rows": 8, "group": 4, "prompt": 24, "tokens": 8, "pixels": 32}
TINY |= {"micro_batch_tokens": 128, "dtype": "float32"}
"""Sequences of a request and of a training step, sequences of a prompt, tokens of a prompt with its picture, tokens to
write, pixels of a side of the picture, tokens of a packed row."""
COLUMNS = ("rollout.tokens_per_s", "rollout.peak_gib", "train.tokens_per_s", "train.mfu", "train.peak_gib")
GAPS = ("train.gap.replayed.mean", "train.gap.replayed.beyond_clip", "train.gap.recomputed.mean")


def main() -> int:
    options = parser().parse_args()
    vars(options).update(TINY if options.tiny else REAL)
    with tempfile.TemporaryDirectory(prefix="bench-sequences-") as scratch:
        options.work = Path(scratch)
        if options.layers is None:
            options.layers = 2 if options.tiny else fitting(report.in_child(device_gib))
        write_folder(options.work / "model", options.layers, tiny=options.tiny)
        figures = {stage.__name__: report.in_child(stage, options) for stage in (stages.rollout, stages.train)}
    settings = {name: getattr(options, name) for name in SETTINGS}
    row = {"bench": "sequences", "settings": settings, **figures}
    report.finish("sequences", options, [row], ["settings.engine", "settings.layers", *COLUMNS, *GAPS])
    return 0


def fitting(memory_gib: float) -> int:
    """Layers that fill half of the device's memory, next to what is not a layer."""
    return max(1, min(NUM_LAYERS, int((0.5 * memory_gib * 2**30 - BYTES_OF_REST) // BYTES_OF_LAYER)))


def device_gib() -> float:
    """Memory of the first device."""
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory / 2**30)


def parser() -> argparse.ArgumentParser:
    flags = report.parser("sequences", __doc__)
    flags.add_argument("--engine", choices=("transformers", "vllm"), default="transformers", help="of the rollouts")
    flags.add_argument("--layers", type=int, help="of the language model (what fits, at most 48)")
    flags.add_argument("--steps", type=int, default=3, help="measured requests and training steps (3)")
    flags.add_argument("--tiny", action="store_true", help="tiny model, for a laptop")
    return flags


if __name__ == "__main__":
    sys.exit(main())
