"""Queries or keys of a joint attention in one pass: RMS norm of each head, rotary embedding, and text before image.

On CUDA it is one Triton kernel (heads_triton.py), which writes where attention reads and rounds once; elsewhere the
formula itself, by torch's own operations in diffusers' order, which round after each.
"""

from typing import Any

import torch
from torch import Tensor

from flowfleet.hardware import devices
from flowfleet.quantization import fused
from flowfleet.quantization.rows import HAS_TRITON, operator


def fits(width: int, device: torch.device) -> bool:
    """Returns True if the device has a kernel for heads of that width."""
    return fused.is_on(device) and width.bit_count() == 1


def joint_heads(
    text: Tensor,
    image: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    freqs: tuple[Tensor, Tensor],
    *,
    width: int,
    eps: float,
) -> Tensor:
    """Heads (B, S_text + S_image, H, width) of two streams, normalized and rotated; the streams' dtype.

    Args:
        text: (B, S_text, H · width).
        image: (B, S_image, H · width).
        norms: Weights (width,) of the RMS norm of text and image; None: no norm.
        freqs: Unit complex numbers (S, width / 2) that turn pairs of channels, of text and image.
        width: Channels of a head.
        eps: Of the norms.
    """
    text_freqs, image_freqs = (torch.view_as_real(part).flatten(1) for part in freqs)
    output: Tensor = _joint_heads(text, image, *norms, text_freqs, image_freqs, width, eps)
    return output


@operator("flowfleet::joint_heads", mutates_args=())  # type: ignore[untyped-decorator]
def _joint_heads(
    text: Tensor,
    image: Tensor,
    text_weight: Tensor | None,
    image_weight: Tensor | None,
    text_freqs: Tensor,
    image_freqs: Tensor,
    width: int,
    eps: float,
) -> Tensor:
    """Frequencies are (S, width): cosine and sine of each pair, one after the other."""
    if devices.has_triton(image.device):
        from flowfleet.quantization import heads_triton

        return heads_triton.joint_heads(text, image, text_weight, image_weight, text_freqs, image_freqs, width, eps)
    return torch.cat(
        [
            heads_formula(text, text_weight, text_freqs, width, eps),
            heads_formula(image, image_weight, image_freqs, width, eps),
        ],
        dim=1,
    )


def heads_formula(x: Tensor, weight: Tensor | None, freqs: Tensor, width: int, eps: float) -> Tensor:
    """Computes the result of `_joint_heads` for one stream."""
    heads = torch.unflatten(_wide(x), -1, (-1, width))
    if weight is not None:
        heads = _wide((heads * _inverse(heads, eps)).to(x.dtype) * weight)
    return _turned(heads, freqs, 1).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _inverse(heads: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(heads.square().mean(dim=-1, keepdim=True) + eps)


def _turned(heads: Tensor, freqs: Tensor, direction: int) -> Tensor:
    """Pairs of channels of (B, S, H, width) turned by the frequencies, or back with -1."""
    first, second = torch.unflatten(heads, -1, (-1, 2)).unbind(-1)
    cos, sin = torch.unflatten(freqs, -1, (-1, 2))[:, None].unbind(-1)
    sin = direction * sin
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.width, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    text, image, text_weight, image_weight, text_freqs, image_freqs = ctx.saved_tensors
    of_text, of_text_weight = _stream_backward(ctx, grad[:, : text.shape[1]], text, text_weight, text_freqs)
    of_image, of_image_weight = _stream_backward(ctx, grad[:, text.shape[1] :], image, image_weight, image_freqs)
    return of_text, of_image, of_text_weight, of_image_weight, None, None, None, None


def _stream_backward(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor | None, freqs: Tensor
) -> tuple[Tensor, Tensor | None]:
    into, of_weight = _turned(_wide(grad), freqs, -1), None
    if weight is not None:
        heads = torch.unflatten(_wide(x), -1, (-1, ctx.width))
        inverse = _inverse(heads, ctx.eps)
        normed, of_normed = heads * inverse, into * weight
        of_weight = (into * normed).sum(dim=(0, 1, 2)).to(weight.dtype)
        into = inverse * (of_normed - normed * (of_normed * normed).mean(dim=-1, keepdim=True))
    return into.flatten(-2).to(x.dtype), of_weight


_joint_heads.register_autograd(_backward, setup_context=_keep)

if not HAS_TRITON:

    @_joint_heads.register_fake  # type: ignore[untyped-decorator]
    def _(
        text: Tensor,
        image: Tensor,
        text_weight: Tensor | None,
        image_weight: Tensor | None,
        text_freqs: Tensor,
        image_freqs: Tensor,
        width: int,
        eps: float,
    ) -> Tensor:
        batch, tokens, channels = image.shape
        return image.new_empty(batch, text.shape[1] + tokens, channels // width, width)
