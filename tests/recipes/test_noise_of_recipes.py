"""No recipe adds noise that its schedule is too coarse for, unless it says so. No weights are read; a checkpoint that
is not in the repository is stood in for by a tiny one of its family, with the scheduler as published."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from flowfleet.algorithms.coarse import check_noise
from flowfleet.job.files import recipe_names
from flowfleet.job.spec import load_job
from flowfleet.models.base import ModelAdapter
from flowfleet.planning.skeleton import load_skeleton
from tests.tiny_models import make_tiny

ROOT = Path(__file__).parents[2]
RECIPES = [Path("recipes") / f"{name}.toml" for name in recipe_names()]
KINDS = {
    "qwen-image-edit": "qwen_image_edit",
    "qwen-image-2.1": "qwen_image_21",
    "flux.2-klein": "flux2_klein",
    "flux.1-kontext": "flux_kontext",
    "sana": "sana",
    "krea": "krea2",
    "ltx-2": "ltx2",
    "tiny-edit": "flux_kontext",
    "tiny-sound": "ltx2",
    "hunyuanvideo-1.5": "hunyuan_video_15",
    "ti2v": "wan_5b",
    "i2v": "wan_image",
    "qwen-image": "qwen_image",
    "flux": "flux_distilled",
    "stable-diffusion-3": "stable_diffusion_3",
    "sd3": "stable_diffusion_3",
    "z-image": "z_image",
    "chroma": "chroma",
    "bagel": "bagel",
    "hunyuanimage-3": "hunyuan_image3",
    "hunyuan_image3": "hunyuan_image3",
    "wan2.2": "wan_two_experts",
    "wan": "wan",
}
"""A part of a checkpoint's name to its stand-in; the first that fits."""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelAdapter]:
    """Adapters by the path that a recipe names."""

    @cache
    def load(kind: str) -> ModelAdapter:
        return load_skeleton(make_tiny(kind, tmp_path_factory.mktemp("models") / kind), torch.float32, ())

    def find(path: str) -> ModelAdapter:
        if (ROOT / path / "model_index.json").exists():
            return load_skeleton(ROOT / path, torch.float32, ())
        kinds = [kind for part, kind in KINDS.items() if part in path.lower()]
        assert kinds, f"{path}: name the family of this checkpoint in KINDS"
        return load(kinds[0])

    return find


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_recipe_adds_no_noise_that_stays(recipe: Path, stand_in: Callable[[str], ModelAdapter]) -> None:
    spec = load_job(ROOT / recipe)
    if spec.writes_tokens:
        return
    rollout = spec.rollout
    check_noise(spec, stand_in(spec.model.path).schedule(rollout.num_inference_steps, rollout.size, rollout.shift))
