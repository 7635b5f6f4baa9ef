"""What do the digests of a checkpoint cost?

    python -m bench.scale.checkpoint --gib 10 [--device cuda] [--rounds 3] [--directory DIR] [--memory-gib 2]
        [--out FILE]

Writes and reads a state of weights and two moments in fp32 by the trainer's own code, in turns with digests and
without, and prints seconds and the ratios of their medians. Written means synced to disk; `cold` reads come from the
disk, `warm` ones from the page cache. `--memory-gib` lets many tensors share that much memory, for a state larger than
the machine's. Runs one rank; needs twice `--gib` on the disk of `--directory`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from services.trainer.checkpoints import files as checkpoint_files
from services.trainer.parallel.ranks import Ranks

TENSOR_BYTES = 64 * 2**20
KINDS = ("trained", "exp_avg", "exp_avg_sq")


class NoDigest(checkpoint_files.Digest):
    """Sums nothing."""

    def add(self, piece: Any) -> None:
        return


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scale.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gib", type=float, default=10.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--memory-gib", type=float)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("FLOWFLEET_DEVICE", options.device)
    ranks = Ranks()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        tensors = state(options.gib, options.memory_gib or options.gib, options.device)
        seconds = measured(tensors, Path(folder), ranks, options.rounds)
    ranks.close()
    report = {
        "gib": options.gib,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "rounds": options.rounds,
        "seconds": seconds,
        "medians": {name: statistics.median(values) for name, values in seconds.items()},
        "ratios": {
            part: statistics.median(seconds[f"{part} with"]) / statistics.median(seconds[f"{part} without"])
            for part in ("save", "load cold", "load warm")
        },
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


def state(gib: float, memory_gib: float, device: str) -> dict[str, Tensor]:
    """`gib` of tensors in `memory_gib` of memory, filled with noise."""
    count, held = (max(1, round(size * 2**30 / TENSOR_BYTES)) for size in (gib, memory_gib))
    memory = [torch.rand(TENSOR_BYTES // 4096, 1024, device=device) for _ in range(min(count, held))]
    return {f"{KINDS[n % 3]}.block.{n // 3}.weight": memory[n % len(memory)] for n in range(count)}


def measured(tensors: dict[str, Tensor], folder: Path, ranks: Ranks, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by what was done. Which goes first changes from round to round."""
    seconds = defaultdict[str, list[float]](list)
    for number in range(rounds):
        for mode in ("with", "without") if number % 2 else ("without", "with"):
            with contextlib.nullcontext() if mode == "with" else without_digests():
                target = folder / mode
                target.mkdir()
                began = clock()
                digests = checkpoint_files.write(tensors, target, ranks)
                seconds[f"save {mode}"].append(clock() - began)
                for heat in ("cold", "warm"):
                    if heat == "cold":
                        drop_cache(target)
                    began = clock()
                    digests = digests if mode == "with" else {}
                    checkpoint_files.read_verified(tensors, target, {"digests": digests}, ranks)
                    seconds[f"load {heat} {mode}"].append(clock() - began)
                shutil.rmtree(target)
                print({name: round(values[-1], 2) for name, values in seconds.items() if name.endswith(f" {mode}")})
    return dict(seconds)


@contextlib.contextmanager
def without_digests() -> Iterator[None]:
    with mock.patch.object(checkpoint_files, "Digest", NoDigest):
        yield


def drop_cache(folder: Path) -> None:
    """The files' pages, which are clean: they were synced."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def clock() -> float:
    """Seconds, once the device has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
