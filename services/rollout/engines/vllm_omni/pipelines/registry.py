"""Maps families to our vLLM-Omni pipelines. Free of vLLM-Omni, so that a wrong model fails at once."""

from __future__ import annotations

from flowfleet.models.registry import ModelFamily

PIPELINES = {
    "QwenImagePipeline": f"{__package__}.qwen_image.QwenImageRolloutPipeline",
    "StableDiffusion3Pipeline": f"{__package__}.stable_diffusion_3.StableDiffusion3RolloutPipeline",
    "WanPipeline": f"{__package__}.wan.WanRolloutPipeline",
}
"""diffusers' pipeline class → ours."""


def pipeline_for(family: ModelFamily) -> str:
    """The name of our pipeline class. Raises ValueError for a family that has none."""
    if family.pipeline not in PIPELINES:
        raise ValueError(
            f"the vllm-omni engine does not draw {family.title}: start rollouts with --engine diffusers, or use one of "
            f"{', '.join(sorted(PIPELINES))}"
        )
    return PIPELINES[family.pipeline]
