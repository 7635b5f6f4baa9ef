"""Stable Diffusion 3 and 3.5 on vLLM-Omni's transformer."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import nn
from vllm_omni.diffusion.models.sd3.sd3_transformer import SD3Transformer2DModel

from services.rollout.engines.vllm_omni.pipelines.base import RolloutPipeline


class StableDiffusion3Transformer(SD3Transformer2DModel):
    """vLLM-Omni's, with the configuration that diffusers' has, and named parts of its fused linears."""

    packed_modules_mapping: ClassVar[Mapping[str, list[str]]] = {
        "to_qkv": ["to_q", "to_k", "to_v"],
        "add_kv_proj": ["add_q_proj", "add_k_proj", "add_v_proj"],
    }

    def __init__(self, od_config: Any) -> None:
        super().__init__(od_config=od_config)
        self.config = SimpleNamespace(**od_config.tf_model_config.to_dict())
        self.pos_embed.pos_embed = self.pos_embed.pos_embed.to(od_config.dtype)  # As diffusers loads it.


class StableDiffusion3RolloutPipeline(RolloutPipeline):
    _dit_modules: ClassVar[list[str]] = ["transformer"]

    def make_transformer(self, component: str) -> nn.Module:
        with self.device:
            transformer: nn.Module = StableDiffusion3Transformer(self.od_config)
        return transformer
