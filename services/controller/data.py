"""Prompts: read once a job, dealt out by step. Which prompt a group of a step gets is a pure function of the seed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import fsspec
import numpy as np

from flowfleet.seeds import derive_seed


@dataclass(frozen=True)
class Prompt:
    text: str
    metadata: dict[str, str] = field(default_factory=dict)


def load_prompts(url: str) -> list[Prompt]:
    """Reads a .txt file (one prompt a line) or .jsonl ({"prompt": …, "metadata": {…}}); blank lines are skipped.

    Raises ValueError naming the file and line that is wrong.
    """
    try:
        with fsspec.open(url, "rt", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"{url}: prompts cannot be read: {error}") from None
    parse = _parse_json if url.endswith(".jsonl") else lambda line, where: Prompt(line)
    prompts = [parse(line.strip(), f"{url}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{url}: holds no prompt")
    return prompts


def prompts_of_step(prompts: list[Prompt], seed: int, step: int, count: int) -> list[Prompt]:
    """The `count` prompts of a step: passes over the data, each shuffled anew, cut into steps. Nothing is left out."""
    return [_nth(prompts, seed, step * count + k) for k in range(count)]


def _nth(prompts: list[Prompt], seed: int, position: int) -> Prompt:
    epoch, offset = divmod(position, len(prompts))
    order = np.random.default_rng(derive_seed(seed, "epoch", epoch)).permutation(len(prompts))
    return prompts[int(order[offset])]


def _parse_json(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
        metadata = {str(key): str(value) for key, value in record.get("metadata", {}).items()}
        return Prompt(str(record["prompt"]), metadata)
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError):
        raise ValueError(f'{where}: expected an object like {{"prompt": "…", "metadata": {{…}}}}') from None
