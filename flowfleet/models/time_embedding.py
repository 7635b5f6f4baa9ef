"""The embedding of a time by sines and two linears, as several transformers have it."""

import math
from typing import Final

import torch
from torch import Tensor, nn

FREQUENCIES: Final = 256
"""Cosines and sines together."""
MAX_PERIOD: Final = 10_000


class TimeEmbedding(nn.Module):
    """Embeds times in `width` channels; `activation` stands between the linears."""

    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), activation, nn.Linear(width, width))

    def forward(self, times: Tensor) -> Tensor:
        """(B, width) of times (B,) float32."""
        half = FREQUENCIES // 2
        falling = torch.arange(half, dtype=torch.float32, device=times.device)
        angles = times[:, None].float() * torch.exp(-math.log(MAX_PERIOD) * falling / half)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        embedded: Tensor = self.mlp(waves.to(next(self.mlp.parameters()).dtype))
        return embedded
