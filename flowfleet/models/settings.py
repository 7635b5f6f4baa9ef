"""Settings of a sample, as plain values without torch: job files, rollouts, trainers and adapters share them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """Size of one sample; a picture is a video of one frame."""

    height: int
    """Pixels."""
    width: int
    """Pixels."""
    num_frames: int = 1


@dataclass(frozen=True, slots=True)
class Guidance:
    """How strongly the prompt steers."""

    scale: float = 1.0
    """Classifier-free guidance with two forwards, n + scale (p - n); 1 is off and takes one."""
    embedded: float | None = None
    """Guidance input of a guidance-distilled model (FLUX.1-dev); None is the family's default."""

    @property
    def is_on(self) -> bool:
        return self.scale > 1


NO_GUIDANCE = Guidance()
