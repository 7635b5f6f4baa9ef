"""How fast does a policy that writes text sample and train at the real width of Qwen3-Omni's Thinker, on one GPU?

    python -m bench.sequences.speed [--engine vllm] [--layers N] [--json FILE]
    python -m bench.sequences.speed --tiny

Three stages, each in a process of its own, on random weights that are drawn on the device:

rollout   the engine samples questions with a picture, with the trainer's adapter in it
train     the trainer's own step on these sequences: GSPO, LoRA, packed rows; then the gap of log-probs between trainer
          and rollout, with the experts of the rollout taken again and without
publish   all weights of as many layers as fit are trained by a step and sent to the engine's live weights, which are
          verified by the trainer's hashes

Prints a line of JSON and tables. `--layers` is as many as leave half of the device's memory free, at most 48. Medians
are over the requests and steps that fit into a stage's share of `--budget`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.h200 import machine
from bench.sequences.folder import (
    BYTES_OF_LAYER,
    BYTES_OF_REST,
    NUM_LAYERS,
    PARAMETERS_OF_LAYER,
    PARAMETERS_OF_REST,
    write_folder,
)

STAGES = {"rollout": 0.48, "train": 0.3, "publish": 0.22}
"""Name to its share of the budget."""
BYTES_OF_TRAINED = 18
"""Bytes per parameter of full training: master, gradient, two moments, and the rollout's own in bfloat16."""


def main() -> int:
    options = parser().parse_args()
    if options.tiny:
        options.rows, options.prompt, options.tokens, options.pixels = min(options.rows, 8), 24, 8, 32
        options.group, options.micro_batch_tokens, options.dtype = 4, 128, "float32"
    if options.stage:
        from bench.sequences import stages

        print(json.dumps(getattr(stages, options.stage)(options)), flush=True)
        return 0
    rows = run_all(options)
    figures = {"bench": "sequences", "settings": settings(options), **rows}
    result = {"machine": machine(), "command": command(), "gpus": 1, "figures": [figures]}
    print(json.dumps(result), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{tables(result)}")
    return int(any("failed" in row for row in rows.values()))


def run_all(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What each stage printed, or why it failed."""
    with tempfile.TemporaryDirectory(prefix="bench-sequences-") as scratch:
        work = Path(scratch)
        if options.layers is None:
            options.layers = 2 if options.tiny else fitting(options.memory_gib, BYTES_OF_LAYER, BYTES_OF_REST)
        if options.full_layers is None:
            each, rest = PARAMETERS_OF_LAYER * BYTES_OF_TRAINED, PARAMETERS_OF_REST * BYTES_OF_TRAINED
            options.full_layers = 2 if options.tiny else fitting(options.memory_gib, each, rest, 0.6)
        write_folder(work / "model", options.layers, tiny=options.tiny)
        write_folder(work / "full", options.full_layers, tiny=options.tiny)
        return {stage: in_child(stage, share, work, options) for stage, share in STAGES.items()}


def fitting(memory_gib: float | None, layer: float, rest: float, share: float = 0.5) -> int:
    """Layers of `layer` bytes, next to `rest`, that fill this share of the device's memory."""
    room = share * (memory_gib or device_gib()) * 2**30 - rest
    return max(1, min(NUM_LAYERS, int(room // layer)))


def device_gib() -> float:
    """Memory of the first device, asked for in a process that leaves nothing on it."""
    code = "import torch; print(torch.cuda.get_device_properties(0).total_memory / 2**30)"
    return float(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)


def in_child(stage: str, share: float, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A stage in a process whose memory is free afterwards."""
    given = {name: value for name, value in vars(options).items() if name not in ("stage", "json", "tiny", "work")}
    argv = [sys.executable, "-m", "bench.sequences.speed", "--stage", stage, "--work", str(work)]
    argv += [part for name, value in given.items() if value is not None for part in (_flag(name), str(value))]
    argv += ["--tiny"] if options.tiny else []
    limit = share * options.budget
    began = time.monotonic()
    try:
        done = subprocess.run([*argv, "--stage-s", str(limit)], stdout=subprocess.PIPE, timeout=limit + options.grace)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {limit + options.grace:.0f} s"}
    seconds = round(time.monotonic() - began, 1)
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"failed": f"exit status {done.returncode}", "stage_s": seconds}
    print(f"[{stage}: {seconds} s] {lines[-1]}", file=sys.stderr, flush=True)
    return {**json.loads(lines[-1]), "stage_s": seconds}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    names = (
        "layers",
        "full_layers",
        "rows",
        "group",
        "prompt",
        "tokens",
        "micro_batch_tokens",
        "rank",
        "checkpointing",
    )
    return {name: getattr(options, name) for name in (*names, "dtype", "tiny", "engine")}


def tables(result: dict[str, Any]) -> str:
    """What the stages came to, as on the page."""
    from bench.performance_tables import sequence_tables

    return sequence_tables({"sequences": result})


def command() -> str:
    return " ".join(["bench.sequences.speed", *sys.argv[1:]])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="python -m bench.sequences.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("--engine", choices=("transformers", "vllm"), default="transformers", help="of the rollouts")
    flags.add_argument("--layers", type=int, help="of the language model (what fits, at most 48)")
    flags.add_argument("--full-layers", type=int, help="of the stage publish (what fits)")
    flags.add_argument("--memory-gib", type=float, help="of the device (asked)")
    flags.add_argument("--rows", type=int, default=128, help="sequences of a request and of a training step (128)")
    flags.add_argument("--group", type=int, default=16, help="sequences of a prompt (16)")
    flags.add_argument("--prompt", type=int, default=256, help="tokens of a prompt, its picture's included (256)")
    flags.add_argument("--tokens", type=int, default=192, help="tokens to write (192)")
    flags.add_argument("--pixels", type=int, default=448, help="of a side of the picture (448)")
    flags.add_argument("--rank", type=int, default=32, help="of the LoRA (32)")
    flags.add_argument("--micro-batch-tokens", type=int, default=8192, help="of a packed row (8192)")
    flags.add_argument("--checkpointing", choices=("none", "selective", "full"), default="full")
    flags.add_argument("--dtype", default="bfloat16")
    flags.add_argument(
        "--steps", type=int, default=3, help="requests and training steps that are measured, at most (3)"
    )
    flags.add_argument("--budget", type=float, default=190.0, help="seconds (190)")
    flags.add_argument("--grace", type=float, default=10.0, help="seconds that a stage may take beyond its share (10)")
    flags.add_argument("--json", type=Path, help="write the result here as well")
    flags.add_argument("--tiny", action="store_true", help="tiny model, for a laptop")
    flags.add_argument("--stage", choices=tuple(STAGES), help=argparse.SUPPRESS)
    flags.add_argument("--stage-s", type=float, default=60.0, help=argparse.SUPPRESS)
    flags.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return flags


if __name__ == "__main__":
    sys.exit(main())
