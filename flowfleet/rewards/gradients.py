"""Pixels and gradients of `ScoreWithGradient` as NumPy arrays, and calls cut to what both ends take.

A picture travels as safetensors with one tensor: `pixels`, and back `gradient`, both float32 (3, height, width).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from flowfleet.media.files import MediaLimits
from flowfleet.models.settings import Size
from flowfleet.proto.reward_pb2 import PixelSample
from flowfleet.rpc.endpoint import MAX_MESSAGE_BYTES

Pixels = NDArray[np.float32]
"""(3, height, width)."""

MAX_GRADIENT_BYTES: Final = MAX_MESSAGE_BYTES // 2
"""Most bytes of pixels in a call: well below the limit of a message."""
DECODED_AT_ONCE: Final = 512 * 512
"""Pixels, of all frames, of the samples that a trainer decodes together with gradient; a larger sample is alone."""
PIXELS, GRADIENT = "pixels", "gradient"

_CHANNELS = 3


def num_decoded_together(size: Size) -> int:
    """Samples of a size that a trainer decodes together, 1 at least."""
    return max(1, DECODED_AT_ONCE // (size.height * size.width * size.num_frames))


@dataclass(frozen=True, eq=False, slots=True)
class PixelInput:
    """Picture of a call for scores with gradients."""

    pixels: Pixels
    """Red, green and blue, each from 0 to 1."""
    prompt: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    sample_id: str = ""

    @classmethod
    def of(cls, message: PixelSample) -> PixelInput:
        """Raises ValueError, which says what is wrong, for pixels that are not a picture."""
        pixels = read_tensor(message.pixels, PIXELS)
        check_pixels(pixels)
        return cls(pixels, message.prompt, dict(message.metadata), message.sample_id)

    def message(self) -> PixelSample:
        return PixelSample(
            sample_id=self.sample_id,
            pixels=write_tensor(self.pixels, PIXELS),
            prompt=self.prompt,
            metadata=self.metadata,
        )


def write_tensor(values: Pixels, name: str) -> bytes:
    """safetensors bytes of one tensor."""
    return save({name: np.ascontiguousarray(values, np.float32)})


def read_tensor(data: bytes, name: str) -> Pixels:
    """The tensor of this name. Raises ValueError unless the bytes hold it alone, as float32."""
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{name} is not valid safetensors: {error}") from None
    if set(tensors) != {name}:
        raise ValueError(f"the tensors are {', '.join(sorted(tensors)) or 'none'}; send one named {name}")
    tensor = tensors[name]
    if tensor.dtype != np.float32:
        raise ValueError(f"{name} is {tensor.dtype}; send float32")
    return tensor


def check_pixels(pixels: Pixels, limits: MediaLimits = MediaLimits()) -> None:
    """Raises ValueError for what is not a picture, or is larger than rewards read."""
    if pixels.ndim != 3 or pixels.shape[0] != _CHANNELS or 0 in pixels.shape:
        raise ValueError(f"pixels have shape {pixels.shape}; send (3, height, width)")
    _, height, width = pixels.shape
    if excess := limits.excess(width, height, 1):
        raise ValueError(f"pixels of {excess}")
    if not bool(((pixels >= 0) & (pixels <= 1)).all()):
        raise ValueError("pixels lie outside 0 to 1, or are not finite")


def read_gradient(data: bytes, shape: tuple[int, ...]) -> Pixels:
    """The gradient for pixels of this shape. Raises ValueError unless it fits them and is finite."""
    gradient = read_tensor(data, GRADIENT)
    if gradient.shape != shape:
        raise ValueError(f"the gradient has shape {gradient.shape}, its pixels have {shape}")
    if not bool(np.isfinite(gradient).all()):
        raise ValueError("the gradient has NaN or infinite elements")
    return gradient


def cut(samples: Sequence[PixelInput], max_samples: int, max_bytes: int) -> Iterator[list[PixelInput]]:
    """Cuts samples, in order, into calls within both limits; a sample over `max_bytes` gets a call of its own."""
    call: list[PixelInput] = []
    size = 0
    for sample in samples:
        if call and (len(call) == max_samples or size + sample.pixels.nbytes > max_bytes):
            yield call
            call, size = [], 0
        call.append(sample)
        size += sample.pixels.nbytes
    if call:
        yield call
