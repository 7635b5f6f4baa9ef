"""BAGEL's transformer against vLLM-Omni's, on the same tiny random checkpoint: pictures, answers, names and the VAE."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flowfleet.algorithms.sde import ode_step
from flowfleet.models.base import ModelAdapter
from flowfleet.models.registry import adapter_for, family_of, sequence_adapter_for
from flowfleet.models.sequences.adapter import SequenceAdapter, Tokens
from flowfleet.models.sequences.prompts import PromptMedia
from flowfleet.models.settings import Guidance, Size
from services.rollout.engines.vllm_omni.pipelines.registry import pipeline_for
from services.rollout.engines.vllm_omni.plugin import ASKED, TARGET
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.skipif(find_spec("vllm_omni") is None, reason="needs vLLM-Omni: make vllm-omni")
"""Not an import: that chooses the platform, before an engine asks for the CPU's, for all tests of the process."""

TOLERANCE = 1e-4
RUN = """
import sys
from pathlib import Path
from services.rollout.engines.vllm_omni import slim_imports
slim_imports.install()
from tests.services.rollout.bagel_reference import main
main(Path(sys.argv[1]), Path(sys.argv[2]))
"""
ROOT = Path(__file__).parents[3]
SIZE = Size(32, 48)
PICTURE = PromptMedia("picture", np.random.default_rng(3).integers(256, size=(24, 20, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("bagel", tmp_path_factory.mktemp("models") / "bagel", seed=5)


@pytest.fixture(scope="module")
def painter(checkpoint: Path) -> ModelAdapter:
    return adapter_for(checkpoint).load(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def writer(checkpoint: Path) -> SequenceAdapter:
    return sequence_adapter_for(checkpoint).load(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def reference() -> Any:
    """The constants of the reference's process, without its imports."""
    source = (Path(__file__).parent / "bagel_reference.py").read_text()
    names: dict[str, Any] = {"Any": Any}
    lines = source[source.index("PROMPTS =") : source.index("class _Float32")]
    exec(compile(lines, "bagel_reference", "exec"), names)
    return names


@pytest.fixture(scope="module")
def found(
    checkpoint: Path, painter: ModelAdapter, writer: SequenceAdapter, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What vLLM-Omni computes."""
    output = tmp_path_factory.mktemp("reference")
    question = writer.encode("x", [PICTURE])
    inputs = {
        "noise": painter.initial_latents([1, 2], SIZE),
        "patches": question.inputs["patches"],
        "places": question.inputs["patch_places"],
        "planes": torch.randn(1, 16, 4, 6, generator=torch.Generator().manual_seed(0)),
    }
    save_file(inputs, output / "inputs.safetensors")
    command = [sys.executable, "-c", RUN, str(checkpoint), str(output)]
    environment = os.environ | {ASKED: "1", TARGET: "cpu", "VLLM_CONFIGURE_LOGGING": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    names = json.loads((output / "names.json").read_text())
    return {**load_file(output / "found.safetensors"), **names, "planes": inputs["planes"]}


@pytest.mark.long
def test_pictures_are_vllm_omnis(found: dict[str, Any], painter: ModelAdapter, reference: Any) -> None:
    """Final latents of the ODE with every kind of guidance; prompts and negative prompts of different lengths together
    in one batch, where vLLM-Omni has them one by one. 15 levels are 14 steps."""
    schedule = painter.schedule(reference["POINTS"] - 1, SIZE)
    assert torch.equal(schedule.sigmas[:-1], found["timesteps"])
    prompts, negative = painter.encode(reference["PROMPTS"]), painter.encode(reference["NEGATIVES"])
    for number, settings in enumerate(reference["GUIDANCES"]):
        guidance = Guidance(
            settings["cfg_text_scale"],
            interval=settings["cfg_interval"],
            image_scale=settings["cfg_img_scale"],
            renorm=settings["cfg_renorm_type"],
        )
        latents = painter.initial_latents([1, 2], SIZE)
        with torch.no_grad():
            for step, timestep in enumerate(schedule.timesteps):
                velocity = painter.velocity(latents, timestep, prompts, size=SIZE, guidance=guidance, negative=negative)
                latents = ode_step(latents, velocity, *schedule.sigmas[step : step + 2])
        for row in range(2):
            expected = found[f"latents.{number}.{row}"]
            torch.testing.assert_close(latents[row], expected, rtol=0, atol=TOLERANCE, msg=f"{settings} row {row}")
            assert (expected - painter.initial_latents([1, 2], SIZE)[row]).abs().max() > 100 * TOLERANCE


def test_answers_are_vllm_omnis(found: dict[str, Any], writer: SequenceAdapter, reference: Any) -> None:
    """Logits along its likeliest tokens, in one packed row."""
    tokens = found["tokens"]
    question = Tokens(writer.encode(reference["QUESTION"], [PICTURE]), tokens)
    with torch.no_grad():
        inputs = writer.model_inputs([question])
        logits = writer.transformer(**inputs).logits[0, -len(tokens) :]
    torch.testing.assert_close(logits, found["logits"], rtol=0, atol=TOLERANCE)
    assert found["logits"].std() > 100 * TOLERANCE
    log_probs = writer.log_probs([question], temperature=1.0)
    expected = found["logits"].log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=TOLERANCE)


def test_every_name_is_one_that_vllm_omnis_loader_maps(found: dict[str, Any], painter: ModelAdapter) -> None:
    """It fills its whole transformer, picture encoder and VAE from ours. No published checkpoint was at hand."""
    assert found["unfilled"] == []
    own = set(painter.transformer.state_dict())
    assert own <= set(found["stored"])


def test_the_vae_is_vllm_omnis(found: dict[str, Any], painter: ModelAdapter) -> None:
    frames = painter._vae.decode(found["planes"])  # type: ignore[attr-defined]
    levels = ((found["pixels"].clamp(-1, 1) + 1) * 127.5).round().permute(0, 2, 3, 1)
    assert (frames[:, 0].float() - levels).abs().max() <= 1


def test_the_engine_refuses_it_by_name(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"BAGEL: its attention .* bfloat16.*--engine diffusers"):
        pipeline_for(family_of(checkpoint))
