"""Latent pictures as token sequences: 2x2 latent pixels to a token, row by row, as Qwen-Image and FLUX take them."""

from torch import Tensor

from flowfleet.models.settings import Size

PATCH = 2
"""Latent pixels that a token is wide and high."""


def pack(planes: Tensor) -> Tensor:
    """(B, Z, 2r, 2c) latent planes to (B, rc, 4Z) tokens of 2x2 pixels."""
    batch, channels, height, width = planes.shape
    patches = planes.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH**2)


def unpack(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """(B, rc, 4Z) tokens to (B, Z, 2r, 2c) latent planes; undoes `pack`."""
    patches = tokens.reshape(len(tokens), rows, columns, -1, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), -1, rows * PATCH, columns * PATCH)


def token_grid(size: Size, *, multiple: int) -> tuple[int, int]:
    """Rows and columns of tokens of `multiple` pixels. Raises ValueError for what is no picture of whole tokens."""
    height, width = size.height, size.width
    if height < multiple or width < multiple or height % multiple or width % multiple:
        raise ValueError(f"height and width must be multiples of {multiple} pixels, but are {height} and {width}")
    if size.num_frames != 1:
        raise ValueError(f"this model draws one picture, not {size.num_frames} frames: leave num_frames at 1")
    return height // multiple, width // multiple
