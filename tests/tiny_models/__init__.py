"""Random tiny checkpoints, complete in every component, for tests that need a real pipeline but no skill.

Each module has a `make_tiny_…(path, *, seed=0)` that writes the folder of a checkpoint in about a second, without the
network, and returns `path`. `MAKERS` names them all, one for each kind of checkpoint that is supported.
"""

import importlib
from pathlib import Path

MAKERS = {
    "qwen_image": "tests.tiny_models.qwen_image:make_tiny_qwen_image",
    "stable_diffusion_3": "tests.tiny_models.stable_diffusion_3:make_tiny_stable_diffusion_3",
    "flux": "tests.tiny_models.flux:make_tiny_flux",
    "flux_distilled": "tests.tiny_models.flux:make_tiny_flux_distilled",
    "chroma": "tests.tiny_models.chroma:make_tiny_chroma",
    "wan": "tests.tiny_models.wan:make_tiny_wan",
    "wan_two_experts": "tests.tiny_models.wan:make_tiny_wan_two_experts",
    "wan_5b": "tests.tiny_models.wan:make_tiny_wan_5b",
    "wan_image": "tests.tiny_models.wan:make_tiny_wan_image",
    "hunyuan_video_15": "tests.tiny_models.hunyuan_video_15:make_tiny_hunyuan_video_15",
    "hunyuan_video_15_image": "tests.tiny_models.hunyuan_video_15:make_tiny_hunyuan_video_15_image",
    "ltx2": "tests.tiny_models.ltx2:make_tiny_ltx2",
    "z_image": "tests.tiny_models.z_image:make_tiny_z_image",
    "qwen_image_edit": "tests.tiny_models.qwen_image_edit:make_tiny_qwen_image_edit",
    "flux2_klein": "tests.tiny_models.flux2_klein:make_tiny_flux2_klein",
    "flux_kontext": "tests.tiny_models.flux:make_tiny_flux_kontext",
    "sana": "tests.tiny_models.sana:make_tiny_sana",
    "qwen_image_21": "tests.tiny_models.qwen_image_21:make_tiny_qwen_image_21",
    "krea2": "tests.tiny_models.krea2:make_tiny_krea2",
    "bagel": "recipes.tiny_unified.bagel:make_tiny_bagel",
    "qwen_image_edit_2511": "tests.tiny_models.qwen_image_edit:make_tiny_qwen_image_edit_2511",
    "hunyuan_image3": "recipes.tiny_unified.hunyuan_image3:make_tiny_hunyuan_image3",
    "hunyuan_image3_instruct": "recipes.tiny_unified.hunyuan_image3:make_tiny_hunyuan_image3_instruct",
}
"""Kind of checkpoint to "module:function"."""


def make_tiny(kind: str, path: Path, *, seed: int = 0) -> Path:
    """Writes the random tiny checkpoint of a kind under `path` and returns `path`."""
    module, function = MAKERS[kind].split(":")
    made: Path = getattr(importlib.import_module(module), function)(path, seed=seed)
    return made
