"""Names of a transformers model's tensors in its files, where they differ from those of its parameters.

A mixture's experts are stored one by one and are two tensors a layer in the model: `gate_up_proj` (experts, 2 width,
hidden) and `down_proj` (experts, hidden, width). An output layer that is tied to the embeddings is not stored.
Files of Qwen3-Omni's Thinker have no name for its language model; those of the whole Qwen3-Omni begin with `thinker.`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from torch import Tensor

_FUSED: Final = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_RENAMED: Final = (
    ("model.language_model.", "model."),
    ("model.audio_tower.", "audio_tower."),
    ("model.visual.", "visual."),
)
"""Beginnings of parameters' names, and of their names in files."""
WHOLE: Final = "thinker."
"""Before the names of a Thinker's tensors in the files of a whole model."""
_PARTS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Fused:
    """A parameter of all experts of a layer."""

    prefix: str
    parts: tuple[str, ...]

    def of(self, expert: int) -> list[str]:
        """Stored names of an expert's tensors, in the order in which its rows have them."""
        return [f"{self.prefix}.{expert}.{part}.weight" for part in self.parts]


def stored_name(name: str) -> str:
    """A parameter's name in the files of its model."""
    for ours, other in _RENAMED:
        if name.startswith(ours):
            return other + name.removeprefix(ours)
    return name


def fused(name: str) -> Fused | None:
    """How a parameter's experts are stored; None for any other parameter."""
    match = _FUSED.fullmatch(stored_name(name))
    return Fused(match[1], _PARTS[match[2]]) if match else None


def stored(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter as it is written to files."""
    layout = fused(name)
    if layout is None:
        yield stored_name(name), tensor
        return
    for expert, rows in enumerate(tensor):
        yield from zip(layout.of(expert), rows.chunk(len(layout.parts)), strict=True)
