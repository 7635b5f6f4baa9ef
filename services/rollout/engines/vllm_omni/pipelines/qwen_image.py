"""Qwen-Image on vLLM-Omni's transformer."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenEmbedRope, QwenImageTransformer2DModel
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

from services.rollout.engines.vllm_omni.pipelines.base import RolloutPipeline


class QwenImageTransformer(QwenImageTransformer2DModel):
    """vLLM-Omni's, called as diffusers' is: the positions of text tokens follow from the width of the embeds."""

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        img_shapes: Sequence[Sequence[tuple[int, int, int]]] = (),
        return_dict: bool = True,
    ) -> Any:
        return super().forward(
            hidden_states=hidden_states,
            timestep=timestep,
            encoder_hidden_states=encoder_hidden_states,
            encoder_hidden_states_mask=encoder_hidden_states_mask,
            img_shapes=list(img_shapes),
            txt_seq_lens=[encoder_hidden_states.shape[1]] * len(hidden_states),
            return_dict=return_dict,
        )


class QwenImageRolloutPipeline(RolloutPipeline):
    _dit_modules: ClassVar[list[str]] = ["transformer"]
    renames: ClassVar[Mapping[str, str]] = {".to_out.": ".to_out.0."}
    aliases: ClassVar[Mapping[str, str]] = {"transformer.image_rope_prepare.img_in": "transformer.img_in"}

    def make_transformer(self, component: str) -> nn.Module:
        settings = get_transformer_config_kwargs(self.od_config.tf_model_config, QwenImageTransformer2DModel)
        with self.device:
            transformer = QwenImageTransformer(od_config=self.od_config, **settings)
        made = transformer.pos_embed
        rope = QwenEmbedRope(made.theta, made.axes_dim, made.scale_rope)  # On the CPU, as diffusers makes it.
        transformer.pos_embed = transformer.image_rope_prepare.pos_embed = rope
        module: nn.Module = transformer
        return module
