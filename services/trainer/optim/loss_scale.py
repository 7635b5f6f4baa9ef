"""Dynamic loss scaling for float16, whose smallest number is 6e-8.

The loss is a mean over a step's rows and over latent elements: its gradients lie below that and would vanish.

The loss is multiplied by a power of two before the backward, whose float16 gradients overflow to infinity if that was
too much. Each is cast to float32 before ranks reduce them, where the optimizer divides by the scale; both are exact.
An infinite gradient of any rank makes the norm over all ranks infinite: the update is skipped on every rank, and the
scale halved. The rule is that of torch's GradScaler, but for its start: that follows the loss, so that the gradient of
a latent element is about 1/16 where GradScaler's 65,536 would still lose that of a video.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

GROWTH_INTERVAL = 200
"""Updates in a row without overflow after which the scale doubles. GradScaler's 2000 is more than most jobs have."""
START = 2.0**-4
"""Gradient, by a latent element of the velocity, of a row of loss 1 at the start."""
GREATEST = 2.0**60


@dataclass
class LossScale:
    """The scale of a job; the same on every rank. Part of each checkpoint."""

    num_elements: int
    """Elements of a sample's latents."""
    is_on: bool
    """Off it is always 1."""
    scale: float | None = None
    """The scale of the next update; None before the first."""
    num_finite: int = 0
    """Updates in a row without overflow since the scale changed."""

    def before(self, num_rows: int) -> float:
        """The scale of an update whose loss is a mean over so many rows."""
        if not self.is_on:
            return 1.0
        if self.scale is None:
            self.scale = 2.0 ** math.ceil(math.log2(num_rows * self.num_elements * START))
        return self.scale

    def after(self, *, is_finite: bool) -> None:
        """The update's gradients were finite, or not."""
        if self.scale is None:
            return
        self.num_finite = self.num_finite + 1 if is_finite else 0
        if not is_finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.num_finite == GROWTH_INTERVAL:
            self.scale, self.num_finite = min(GREATEST, self.scale * 2), 0

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name in ("scale", "num_finite")}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Restores what `to_json` returned. A checkpoint without a loss scale starts a new one."""
        self.scale, self.num_finite = data.get("scale"), int(data.get("num_finite", 0))
