"""What encoding the prompts of a step costs a replica, the first time and once they are cached.

    python -m bench.speed.prompt_cache MODEL [--prompts 32] [--repeats 5] [--device cpu] [--dtype float32]

Both columns go through the rollout's own encoder. "batched" encodes the same prompts in one call without a cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from flowfleet.models.base import ModelAdapter
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Size
from flowfleet.weights.weights import dtype_of
from services.rollout.engines.base import GenerationRequest, Noise, PromptGroup, Sampling
from services.rollout.engines.prompts import PromptEncoder


def request(number: int) -> GenerationRequest:
    """A group for each of `number` prompts."""
    groups = tuple(PromptGroup(k, f'A photograph of a sign that says "{k}"', (0,), (k,)) for k in range(number))
    return GenerationRequest(groups, Sampling(Size(32, 32, 1), 4), Noise(), "none")


def median_ms(repeats: int, call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds)


def measure(adapter: ModelAdapter, number: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a step's prompts: batched, alone and cached."""
    asked = request(number)
    texts = [group.prompt for group in asked.groups]
    kept = PromptEncoder(adapter)
    kept.encode(asked)
    with torch.no_grad():
        batched = median_ms(repeats, lambda: adapter.encode(texts))
    return {
        "batched": batched,
        "alone": median_ms(repeats, lambda: PromptEncoder(adapter).encode(asked)),
        "cached": median_ms(repeats, lambda: kept.encode(asked)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    adapter = adapter_for(str(options.model)).load(
        str(options.model), dtype=dtype_of(options.dtype), device=torch.device(options.device)
    )
    found = measure(adapter, options.prompts, options.repeats)
    figures = ", ".join(f"{name} {value:.1f} ms" for name, value in found.items())
    print(f"{options.prompts} prompts: {figures}")


if __name__ == "__main__":
    main()
