"""Wan 2.1 and 2.2 text to video on vLLM-Omni's transformer: one, two experts, or a timestep a token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from torch import nn
from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import create_transformer_from_config, load_transformer_config

from services.rollout.engines.vllm_omni.pipelines.base import RolloutPipeline


class WanRolloutPipeline(RolloutPipeline):
    _dit_modules: ClassVar[list[str]] = ["transformer", "transformer_2"]
    renames: ClassVar[Mapping[str, str]] = {
        ".to_out.": ".to_out.0.",
        ".net_0.": ".net.0.",
        ".net_2.": ".net.2.",
        "output_scale_shift_prepare.scale_shift_table": "scale_shift_table",
    }

    def make_transformer(self, component: str) -> nn.Module | None:
        folder = Path(self.od_config.model)
        if not (folder / component).is_dir():
            return None
        with self.device:
            made: nn.Module = create_transformer_from_config(
                load_transformer_config(str(folder), component), component=component
            )
        return made
