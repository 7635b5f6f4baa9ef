"""`python` with `gradient = true`: a function of yours in torch, whose scores autograd differentiates by the pixels.

    def redness(pictures, prompts, metadata):           # (B, 3, H, W) float32 from 0 to 1, and lists of B
        return pictures[:, 0].mean(dim=(1, 2))          # B scores, or a mapping with `score` and components

The tensors are on the CPU, and the pictures of a call have one size. Each score must depend on its own picture alone,
because the gradient taken is that of their sum. `Score` asks the same function, without gradient. A root or a norm has
no finite gradient at 0: add a small number there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowfleet.rewards.gradients import PixelInput
from services.reward.execution.evaluator import FAILED
from services.reward.execution.groups import alike
from services.reward.scorer import GradientOutcome, Outcome, Problem, ProcessLimits, Sample, Score, ScoreGradient
from services.reward.scorers.python import Params, PythonFunction, PythonSettings, as_mapping


class DifferentiableFunction(PythonFunction):
    """The function that the settings name, in this process."""

    isolated = False
    gives_gradient = True

    def __init__(self, settings: PythonSettings, num_threads: int) -> None:
        super().__init__(settings)
        self.call_bytes, self.process_limits = 0, ProcessLimits(settings.batch)
        self._num_threads = num_threads

    def start(self) -> None:
        torch.set_num_threads(self._num_threads)
        super().start()

    def score(self, samples: Sequence[Sample], params: Params) -> list[Outcome]:
        pictures = [
            PixelInput(sample.frames[0].transpose(2, 0, 1).astype(np.float32) / 255, sample.prompt, sample.metadata)
            for sample in samples
        ]
        return self._by_size(pictures, lambda part: self._plain(part, dict(params)))

    def score_with_gradient(self, samples: Sequence[PixelInput], params: Params) -> list[GradientOutcome]:
        return self._by_size(samples, lambda part: self._differentiated(part, dict(params)))

    def _by_size(self, samples: Sequence[PixelInput], call: Callable[[Sequence[PixelInput]], list[Any]]) -> list[Any]:
        """Gives `call` at most `batch` pictures of one size at a time. Returns one outcome per sample, in order."""
        outcomes: dict[int, Any] = {}
        for places in alike(samples, lambda sample: sample.pixels.shape, self._settings.batch):
            outcomes |= zip(places, self.guarded([samples[place] for place in places], call), strict=True)
        return [outcomes[place] for place in range(len(samples))]

    def _plain(self, samples: Sequence[PixelInput], params: Mapping[str, str]) -> list[Outcome]:
        with torch.no_grad():
            given = self._asked(_stacked(samples), samples, params)
        if isinstance(given, Problem):
            return [given] * len(samples)
        return [Score(one.pop("score"), one) for one in _rows(given)]

    def _differentiated(self, samples: Sequence[PixelInput], params: Mapping[str, str]) -> list[GradientOutcome]:
        pixels = _stacked(samples).requires_grad_()
        with torch.enable_grad():
            given = self._asked(pixels, samples, params)
        if isinstance(given, Problem):
            return [given] * len(samples)
        scores = given["score"]
        (gradient,) = torch.autograd.grad(scores.sum(), pixels, allow_unused=True) if scores.requires_grad else (None,)
        if gradient is None:
            text = (
                "gave scores that do not depend on the pixels: compute them from the pictures by torch alone, without "
                "detach, item, NumPy or torch.no_grad"
            )
            return [self._unfit(text)] * len(samples)
        pairs = zip(_rows(given), gradient.numpy(), strict=True)
        return [ScoreGradient(one.pop("score"), slope, one) for one, slope in pairs]

    def _asked(
        self, pixels: Tensor, samples: Sequence[PixelInput], params: Mapping[str, str]
    ) -> dict[str, Tensor] | Problem:
        """`score` and the components, each (B,), or why the function's result is not that."""
        prompts, metadata = [sample.prompt for sample in samples], [dict(sample.metadata) for sample in samples]
        result = self._function(pixels, prompts, metadata, **params)
        given = as_mapping(result)
        if "score" not in given:
            return self._unfit(f"gave a mapping of {', '.join(map(str, given)) or 'nothing'}: name the scores `score`")
        kept = {name: given[name] for name in ("score", *self.components) if name in given}
        for name, value in kept.items():
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            if not isinstance(value, Tensor) or value.shape != (len(samples),):
                return self._unfit(f"gave {found} as {name}: give a tensor of shape ({len(samples)},), one a picture")
        return kept

    def _unfit(self, text: str) -> Problem:
        return Problem(FAILED, f"{self._settings.function} {text}")


def _stacked(samples: Sequence[PixelInput]) -> Tensor:
    return torch.from_numpy(np.stack([sample.pixels for sample in samples]))


def _rows(given: Mapping[str, Tensor]) -> list[dict[str, float]]:
    """Name to number of each sample."""
    columns = {name: value.detach().double().tolist() for name, value in given.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
