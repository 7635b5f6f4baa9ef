"""Qwen-Image's joint attention, as diffusers computes it but for how its parts are multiplied.

The rotary embedding is real arithmetic, which torch.compile fuses with what surrounds it; a product of complex numbers
stays outside compiled graphs. On CUDA a kernel joins the queries of both streams, and one the keys. Queries, keys and
values of a stream are projections of one input, which float8 linears quantize once.
"""

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from torch import Tensor, nn
from torch.nn import functional as F

from flowfleet.quantization import heads
from flowfleet.quantization.layers import project
from flowfleet.quantization.rows import Rows


def use_joint_attention(transformer: nn.Module) -> None:
    """Replaces diffusers' processor in every block."""
    for module in transformer.modules():
        if type(getattr(module, "processor", None)) is QwenDoubleStreamAttnProcessor2_0:
            attention: Any = module
            attention.set_processor(JointAttention())


class JointAttention(QwenDoubleStreamAttnProcessor2_0):  # type: ignore[misc]
    """In place of diffusers' processor, with the same arguments."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        image_rows: Rows | None = None,
        text_rows: Rows | None = None,
        half_widths: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Outputs (B, S, D) of the image's and of the text's stream; the mask (B, S_text) says which tokens count.
        Rows: of the streams, where they are quantized already. Half widths: see `PromptEmbeds`; there is no mask then,
        and what the text's stream holds beyond them is never read."""
        assert attention_mask is None, "the joint mask is made here"
        assert image_rotary_emb is not None
        image = _heads(attn, hidden_states, (attn.to_q, attn.to_k, attn.to_v), image_rows)
        text = _heads(attn, encoder_hidden_states, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), text_rows)
        in_kernel = heads.fits(image[0].shape[-1], image[0].device)
        mask = _joint_mask(encoder_hidden_states_mask, hidden_states)
        if half_widths is None:
            of_text, of_image = self._attend(attn, text, image, image_rotary_emb, mask, in_kernel=in_kernel)
        else:
            assert mask is None, "a half has no padding"
            texts = [_half(text, half, width) for half, width in enumerate(half_widths)]
            images = [_half(image, half) for half in range(2)]
            freqs = [(image_rotary_emb[0], image_rotary_emb[1][:width]) for width in half_widths]
            of_halves = [
                self._attend(attn, *parts, None, in_kernel=in_kernel)
                for parts in zip(texts, images, freqs, strict=True)
            ]
            num_text = encoder_hidden_states.shape[1]
            of_text = torch.cat([F.pad(part, (0, 0, 0, num_text - part.shape[1])) for part, _ in of_halves])
            of_image = torch.cat([part for _, part in of_halves])
        for layer in attn.to_out:  # the second is dropout
            of_image = layer(of_image)
        return of_image, attn.to_add_out(of_text)

    def _attend(
        self,
        attn: Any,
        text: list[Tensor],
        image: list[Tensor],
        freqs: tuple[Tensor, Tensor],
        mask: Tensor | None,
        *,
        in_kernel: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns the joint attention's output for text and image, (B, S, D) each. `text` and `image` hold queries,
        keys and values (B, S, H, D / H); `freqs` holds the image's frequencies, then the text's, as in diffusers."""
        norms = (attn.norm_added_q, attn.norm_q), (attn.norm_added_k, attn.norm_k)
        query, key = (
            _joint(text[part], image[part], norms[part], freqs[::-1], in_kernel=in_kernel) for part in range(2)
        )
        output = dispatch_attention_fn(
            query,
            key,
            torch.cat((text[2], image[2]), dim=1),
            attn_mask=mask,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        output = output.flatten(2, 3).to(query.dtype)
        num_text = text[0].shape[1]
        return output[:, :num_text].contiguous(), output[:, num_text:].contiguous()


def _half(parts: list[Tensor], half: int, width: int | None = None) -> list[Tensor]:
    """Half of the rows, of their first `width` tokens."""
    rows = len(parts[0]) // 2
    return [part[half * rows : (half + 1) * rows, :width].contiguous() for part in parts]


def _joint(
    text: Tensor, image: Tensor, norms: tuple[Any, Any], freqs: tuple[Tensor, Tensor], *, in_kernel: bool
) -> Tensor:
    """Normalized and rotated heads (B, S, H, D) of both streams."""
    if in_kernel:
        text_weight, image_weight = (None if norm is None else norm.weight for norm in norms)
        eps = next((norm.eps for norm in norms if norm is not None), 0.0)
        return heads.joint_heads(
            text.flatten(2), image.flatten(2), (text_weight, image_weight), freqs, width=image.shape[-1], eps=eps
        )
    streams = zip((text, image), norms, freqs, strict=True)
    return torch.cat([rotated(x if norm is None else norm(x), turn) for x, norm, turn in streams], dim=1)


def rotated(x: Tensor, freqs: Tensor) -> Tensor:
    """Rotates pairs of channels of x (B, S, H, D), in float32, by complex `freqs` (S, D / 2); the dtype of x."""
    pairs: Any = x.float()
    first, second = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = freqs.real[:, None], freqs.imag[:, None]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(3).to(x.dtype)


def _heads(attn: Any, x: Tensor, linears: tuple[nn.Module, ...], rows: Rows | None) -> list[Tensor]:
    """Projections (B, S, H, D)."""
    width = attn.inner_dim // attn.heads
    return [part.view(*part.shape[:-1], -1, width) for part in project(x, linears, rows)]


def _joint_mask(mask: Tensor | None, image: Tensor) -> Tensor | None:
    """(B, 1, 1, S) bool: every image token counts."""
    if mask is None:
        return None
    return torch.cat([mask, mask.new_ones(image.shape[:2])], dim=1)[:, None, None, :]
