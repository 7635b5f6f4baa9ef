"""The formula of `heads` as a Triton kernel: a program a token and a few heads, which are read and written once. Import
it only where Triton is: with torch on CUDA, or in Triton's interpreter."""

# Triton is not installed where types are checked, and its kernels are written without.
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from flowfleet.quantization.rows_triton import launchable

_HEADS = 8
"""Heads of a program: with 128 channels and 4 warps a thread moves 16 bytes at a time."""


def joint_heads(
    text: Tensor,
    image: Tensor,
    text_weight: Tensor | None,
    image_weight: Tensor | None,
    text_freqs: Tensor,
    image_freqs: Tensor,
    width: int,
    eps: float,
) -> Tensor:
    """See `heads.joint_heads`; `width` is a power of two."""
    text, image, batch, num_heads = text.contiguous(), image.contiguous(), len(image), image.shape[-1] // width
    num_tokens = text.shape[1] + image.shape[1]
    output = image.new_empty(batch, num_tokens, num_heads, width)
    has_norms = text_weight is not None, image_weight is not None
    weights = (text if text_weight is None else text_weight, image if image_weight is None else image_weight)
    launchable(_joint_heads)[(batch * num_tokens, triton.cdiv(num_heads, _HEADS))](
        *(text, image, *weights, text_freqs.contiguous(), image_freqs.contiguous(), output),
        *(text.shape[1], num_tokens, num_heads, eps, *has_norms, _HEADS, width),
        num_warps=4,
    )
    return output


@triton.jit
def _joint_heads(
    text,
    image,
    text_weight,
    image_weight,
    text_freqs,
    image_freqs,
    output,
    num_text,
    num_tokens,
    num_heads,
    eps,
    HAS_TEXT_NORM: tl.constexpr,
    HAS_IMAGE_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    sample, position = token // num_tokens, token % num_tokens
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    within = head[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (head < num_heads)[:, None]
    target = output + token * num_heads * WIDTH + within
    if position < num_text:
        source = text + (sample * num_text + position) * num_heads * WIDTH + within
        _heads(source, text_weight, text_freqs + position * WIDTH, target, inside, eps, HAS_TEXT_NORM, HEADS, WIDTH)
    else:
        position -= num_text
        source = image + (sample * (num_tokens - num_text) + position) * num_heads * WIDTH + within
        _heads(source, image_weight, image_freqs + position * WIDTH, target, inside, eps, HAS_IMAGE_NORM, HEADS, WIDTH)


@triton.jit
def _heads(
    source, weight, freqs, target, inside, eps, HAS_NORM: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
        x = x * inverse[:, None] * tl.load(weight + tl.arange(0, WIDTH)).to(tl.float32)[None, :]
    first, second = tl.split(tl.reshape(x, (HEADS, WIDTH // 2, 2)))
    cos, sin = tl.split(tl.reshape(tl.load(freqs + tl.arange(0, WIDTH)), (WIDTH // 2, 2)))
    turned = tl.join(first * cos - second * sin, first * sin + second * cos)
    tl.store(target, tl.reshape(turned, (HEADS, WIDTH)).to(target.dtype.element_ty), mask=inside)
