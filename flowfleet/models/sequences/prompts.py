"""A prompt with its media, decoded and as a model takes it. Free of transformers and diffusers, as flows need it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """A picture, a sound or a film that a prompt brings, decoded."""

    kind: Literal["picture", "sound", "film"]
    content: np.ndarray
    """(H, W, 3) uint8 RGB, (samples,) float32 of one channel at 16 kHz, or (F, H, W, 3) uint8."""
    rate: float = 0.0
    """Frames of a film per second; 0: not known."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model takes it, on the CPU."""

    token_ids: Tensor
    """(P,) int64, P at least 1, those that stand for media included."""
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors made of its media, by the names of the model's arguments."""
