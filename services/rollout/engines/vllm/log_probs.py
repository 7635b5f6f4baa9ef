"""vLLM's sampler, with log-probs as the trainer defines them: of all tokens, at the temperature that is sampled with.

vLLM's `raw_logprobs` are at temperature 1, its `processed_logprobs` those of the tokens that top-p leaves.

Tokens that are never drawn are masked here for all sequences at once; vLLM's bad words take a kernel for each token of
each sequence.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from vllm.v1.sample.sampler import Sampler

MODE: Final = "raw_logprobs"
"""vLLM's mode in which `compute_logprobs` gets the logits as the model gave them."""
_GREEDY: Final = 1e-5
"""vLLM takes the likeliest token below."""


class TemperedSampler(Sampler):
    """Draws as vLLM does, but never a token of `undrawn`."""

    _temperature: Tensor | None = None
    """(requests,); None: all take the likeliest token."""

    def __init__(self, undrawn: Sequence[int], device: torch.device) -> None:
        super().__init__(MODE)
        self._undrawn = torch.tensor(undrawn, dtype=torch.int64, device=device)

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        self._temperature = sampling_metadata.temperature
        return super().forward(logits, sampling_metadata, *args, **kwargs)

    def apply_logits_processors(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """After the log-probs, before the draw. `logits` are (requests, V)."""
        processed: Tensor = super().apply_logits_processors(logits, *args, **kwargs)
        return processed.index_fill_(1, self._undrawn, -torch.inf) if len(self._undrawn) else processed

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """(requests, V) float32 of logits (requests, V)."""
        if self._temperature is None:
            return torch.log_softmax(logits.float(), dim=-1)
        divisor = torch.where(self._temperature < _GREEDY, 1.0, self._temperature)
        return torch.log_softmax(logits.float() / divisor[:, None], dim=-1)
