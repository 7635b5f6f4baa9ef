"""Maps families to our vLLM-Omni pipelines. Free of vLLM-Omni, so that a wrong model fails at once."""

from flowfleet.models.registry import ModelFamily

PIPELINES = {
    "QwenImagePipeline": f"{__package__}.qwen_image.QwenImageRolloutPipeline",
    "StableDiffusion3Pipeline": f"{__package__}.stable_diffusion_3.StableDiffusion3RolloutPipeline",
    "WanPipeline": f"{__package__}.wan.WanRolloutPipeline",
}
"""diffusers' pipeline class → ours."""
REFUSED = {
    "BagelForConditionalGeneration": "its attention computes in bfloat16 whatever the job asks for, and its prompts "
    "share no forward, so that log-probs would not be the trainer's",
    "HunyuanImage3ForCausalMM": "its transformer rounds rotated queries and keys to bfloat16, keeps keys of the prompt "
    "between steps, and packs experts so that published weights have no place by name",
}
"""Families that vLLM-Omni draws and this engine does not, and why."""


def pipeline_for(family: ModelFamily) -> str:
    """The name of our pipeline class. Raises ValueError for a family that has none."""
    if reason := REFUSED.get(family.pipeline):
        raise ValueError(f"the vllm-omni engine does not draw {family.title}: {reason}: use --engine diffusers")
    if family.pipeline not in PIPELINES:
        raise ValueError(
            f"the vllm-omni engine does not draw {family.title}: start rollouts with --engine diffusers, or use one of "
            f"{', '.join(sorted(PIPELINES))}"
        )
    return PIPELINES[family.pipeline]
