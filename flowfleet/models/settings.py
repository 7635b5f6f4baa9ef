"""Settings of a sample, as plain values without torch: job files, rollouts, trainers and adapters share them."""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Size:
    """Size of one sample; a picture is a video of one frame."""

    height: int
    """Pixels."""
    width: int
    """Pixels."""
    num_frames: int = 1
    clean_frames: int = 0
    """Latent frames at the start that a condition image gives. They are not part of a sample's latents, so that noise,
    log-probs and losses are of what is free."""

    @property
    def whole(self) -> "Size":
        """The same size with nothing given."""
        return replace(self, clean_frames=0)


Renorm = Literal["global", "channel", "text_channel"]
"""Norm that guidance must not raise: a sample's velocity, each token's, or each token's after the text's branch."""


@dataclass(frozen=True, slots=True)
class Guidance:
    """How strongly the prompt steers."""

    scale: float = 1.0
    """Classifier-free guidance with two forwards, n + scale (p - n); 1 is off and takes one."""
    embedded: float | None = None
    """Guidance input of a guidance-distilled model (FLUX.1-dev); None is the family's default."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Noise levels above the first and up to the second are guided, others take one forward."""
    image_scale: float = 1.0
    """Scale of the branch without condition images (BAGEL)."""
    renorm: Renorm | None = None
    """How a family that offers a choice bounds the guided velocity (BAGEL); None is the family's default."""

    @property
    def is_on(self) -> bool:
        return self.scale > 1


NO_GUIDANCE = Guidance()
