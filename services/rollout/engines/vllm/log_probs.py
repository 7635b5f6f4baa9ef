"""vLLM's sampler, with log-probs as the trainer defines them: of all tokens, at the temperature that is sampled with.

vLLM's `raw_logprobs` are at temperature 1, its `processed_logprobs` those of the tokens that top-p leaves.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from vllm.v1.sample.sampler import Sampler

MODE: Final = "raw_logprobs"
"""vLLM's mode in which `compute_logprobs` gets the logits as the model gave them."""
_GREEDY: Final = 1e-5
"""vLLM takes the likeliest token below."""


class TemperedSampler(Sampler):
    """Draws as vLLM does."""

    _temperature: Tensor | None = None
    """(requests,); None: all take the likeliest token."""

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        self._temperature = sampling_metadata.temperature
        return super().forward(logits, sampling_metadata, *args, **kwargs)

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """(requests, V) float32 of logits (requests, V)."""
        if self._temperature is None:
            return torch.log_softmax(logits.float(), dim=-1)
        divisor = torch.where(self._temperature < _GREEDY, 1.0, self._temperature)
        return torch.log_softmax(logits.float() / divisor[:, None], dim=-1)
