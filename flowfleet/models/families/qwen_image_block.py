"""Qwen-Image's block as float8 linears want it on CUDA: what precedes a product also quantizes for it, in one kernel.

Elsewhere, with other linears and for pictures with condition images, diffusers' own forward runs, which is the
reference.
"""

from typing import Any

from diffusers.models.transformers import transformer_qwenimage
from torch import Tensor, nn

from flowfleet.models.families.qwen_image_attention import JointAttention
from flowfleet.quantization import fused
from flowfleet.quantization.layers import is_quantized
from flowfleet.quantization.rows import Rows


def use_fused_blocks(transformer: nn.Module) -> None:
    """Gives every block of diffusers' this class."""
    for module in transformer.modules():
        if type(module) is transformer_qwenimage.QwenImageTransformerBlock:
            module.__class__ = QwenImageTransformerBlock


class QwenImageTransformerBlock(transformer_qwenimage.QwenImageTransformerBlock):  # type: ignore[misc]
    """In place of diffusers' block. Its name is the one that transformers list their blocks by."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        temb: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulate_index: list[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Outputs (B, S, D) of the text's and of the image's stream."""
        if modulate_index is None and not self.zero_cond_t and fused.is_on(hidden_states.device) and _fits(self):
            streams = hidden_states, encoder_hidden_states
            return _forward(self, *streams, encoder_hidden_states_mask, temb, image_rotary_emb, joint_attention_kwargs)
        plain: tuple[Tensor, Tensor] = super().forward(
            hidden_states,
            encoder_hidden_states,
            encoder_hidden_states_mask,
            temb,
            image_rotary_emb,
            joint_attention_kwargs,
            modulate_index,
        )
        return plain


def _fits(block: Any) -> bool:
    """Returns True if all products that share their input's rows are float8 ones, with our attention between them."""
    attn = block.attn
    linears = (attn.to_q, attn.to_k, attn.to_v, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    mlps = [(mlp.net[0].proj, mlp.net[2]) for mlp in (block.img_mlp, block.txt_mlp)]
    return isinstance(attn.processor, JointAttention) and all(map(is_quantized, (*linears, *mlps[0], *mlps[1])))


def _forward(
    block: Any,
    image: Tensor,
    text: Tensor,
    mask: Tensor | None,
    temb: Tensor,
    freqs: tuple[Tensor, Tensor] | None,
    attention: dict[str, Any] | None,
) -> tuple[Tensor, Tensor]:
    image_mod1, image_mod2 = block.img_mod(temb).chunk(2, dim=-1)
    text_mod1, text_mod2 = block.txt_mod(temb).chunk(2, dim=-1)
    image_in, image_rows, image_gate = fused.norm_rows(image, image_mod1, block.img_norm1.eps)
    text_in, text_rows, text_gate = fused.norm_rows(text, text_mod1, block.txt_norm1.eps)
    of_image, of_text = block.attn.processor(
        block.attn,
        image_in,
        text_in,
        mask,
        image_rotary_emb=freqs,
        image_rows=image_rows,
        text_rows=text_rows,
        **(attention or {}),
    )
    image = _mlp(block.img_mlp, *fused.residual_norm_rows(image, image_gate, of_image, image_mod2, block.img_norm2.eps))
    text = _mlp(block.txt_mlp, *fused.residual_norm_rows(text, text_gate, of_text, text_mod2, block.txt_norm2.eps))
    return text, image


def _mlp(mlp: Any, total: Tensor, values: Tensor, rows: Rows, gate: Tensor) -> Tensor:
    """The residual and its gated change."""
    inner, inner_rows = fused.gelu_rows(mlp.net[0].proj(values, rows=rows))
    change: Tensor = mlp.net[2](inner, rows=inner_rows)
    return total + gate * change
