"""`model.max_sequence_length` of every family that cuts prompts, against diffusers' pipelines with that argument."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flowfleet.conformance.models import RAGGED, generators, sample_ode
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.models.base import ModelAdapter
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.registry import FAMILIES, adapter_for, family_of
from flowfleet.models.settings import Size
from flowfleet.planning.flops import model_flops
from services.trainer.model.engine import model_spec
from tests.flowfleet.models.families.test_wan import load_pipeline as load_wan
from tests.tiny_models import make_tiny

KINDS = ("stable_diffusion_3", "flux", "chroma", "z_image", "wan")
LIMIT = 9
"""Tokens: cuts some of the prompts in every family."""
PADDED = {"stable_diffusion_3": 77 + LIMIT, "flux": LIMIT, "chroma": LIMIT}
"""Width of embeds in families that pad every prompt to the limit."""


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)


def load(checkpoint: Path, tokens: int | None) -> ModelAdapter:
    adapter = adapter_for(checkpoint).load(checkpoint, dtype=torch.float32)
    adapter.limit_tokens(tokens)
    return adapter


def spec_of(path: Path, tokens: int | None) -> JobSpec:
    return parse_job(
        {
            "model": {"path": str(path), "max_sequence_length": tokens},
            "data": {"train": "p.txt"},
            "rewards": {"ocr": {}},
            "rollout": {"height": 64, "width": 64},
            "trainer": {"lora": {"rank": 2}},
        }
    )


def test_samples_are_those_of_the_pipeline(checkpoint: Path) -> None:
    is_video = family_of(checkpoint).modality == "video"
    size = Size(64, 64, 5 if is_video else 1)
    pipeline: Any = (
        load_wan(checkpoint, 1.0) if is_video else adapter_for(checkpoint).pipeline_class.from_pretrained(checkpoint)
    )
    pipeline.set_progress_bar_config(disable=True)
    arguments: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent"}
    adapter, usual = load(checkpoint, LIMIT), load(checkpoint, None)
    if is_video:
        scheduler_class: Any = FlowMatchEulerDiscreteScheduler
        for one in (adapter.pipeline, usual.pipeline):
            one.register_modules(scheduler=scheduler_class())
        arguments["num_frames"] = size.num_frames
    arguments["guidance_scale"] = 0.0 if checkpoint.name.startswith("z_image") else 1.0  # off
    made = pipeline(list(RAGGED), generator=generators(), max_sequence_length=LIMIT, **arguments)
    expected = made.frames if is_video else made.images
    latents = sample_ode(adapter, adapter.encode(RAGGED), size, 2)
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    assert (sample_ode(usual, usual.encode(RAGGED), size, 2) - expected).abs().max() > 1e-4


def test_prompts_and_blank_ones_are_as_wide_as_it_says(checkpoint: Path) -> None:
    adapter = load(checkpoint, LIMIT)

    def width(prompts: PromptEmbeds) -> int:
        return prompts.embeds.shape[1]

    assert width(adapter.encode(RAGGED)) == PADDED.get(checkpoint.name, LIMIT)
    assert width(adapter.blank_prompts(1, LIMIT)) == PADDED.get(checkpoint.name, LIMIT)


def test_the_plan_counts_no_more_tokens_than_there_are(tmp_path: Path) -> None:
    checkpoint = make_tiny("stable_diffusion_3", tmp_path)
    few, usual = (model_flops(spec_of(checkpoint, tokens)) for tokens in (LIMIT, None))
    assert few.sampling(64) < usual.sampling(64)


def test_replicas_that_loaded_the_folder_at_their_start_have_the_default(checkpoint: Path) -> None:
    default = adapter_for(checkpoint).max_sequence_length
    assert default is not None
    assert model_spec(spec_of(checkpoint, None)) == model_spec(spec_of(checkpoint, default))
    assert model_spec(spec_of(checkpoint, None)).max_sequence_length == 0
    assert model_spec(spec_of(checkpoint, LIMIT)).max_sequence_length == LIMIT


def test_families_say_whether_they_cut_prompts() -> None:
    for family in FAMILIES.values():
        assert (family.max_sequence_length is None) == (family.load().max_sequence_length is None), family.title


def test_a_family_that_cuts_no_prompts_refuses_it(tiny_qwen_image: Path) -> None:
    with pytest.raises(ValueError, match=r"leave model\.max_sequence_length out"):
        load(tiny_qwen_image, LIMIT)
    load(tiny_qwen_image, None)
