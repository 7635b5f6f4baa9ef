"""Every family in the trainer: the log-probs that the rollout's sampler stored are recomputed bit for bit."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flowfleet.data.blobs import SyncBlobs
from services.trainer.model import engine
from services.trainer.parallel.blocks import compile_blocks
from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.steps import Drawer, make_spec
from tests.services.trainer.workers import make_worker
from tests.tiny_models import MAKERS, make_tiny

VIDEO = {"num_frames": 5}
SETTINGS: dict[str, dict[str, Any]] = {
    "flux_distilled": {"embedded_guidance": 3.5},
    "wan": VIDEO,
    "wan_two_experts": {**VIDEO, "guidance_scale": 3.0},
    "wan_5b": {**VIDEO, "height": 64, "width": 64, "from_image": True},
    "wan_image": VIDEO,
    "hunyuan_video_15": VIDEO,
    "hunyuan_video_15_image": VIDEO,
    "ltx2": {"num_frames": 9, "sound_share": 0.5},
    "flux2_klein": {"guidance_scale": 2.0},
    "flux_kontext": {"condition_pixels": 1024},
    "qwen_image_edit": {"condition_pixels": 1024, "guidance_scale": 2.0},
    "qwen_image_edit_2511": {"condition_pixels": 1024},
    "stable_diffusion_3": {"guidance_scale": 3.0},
}
"""Settings of `rollout` by kind of checkpoint, where the defaults do not work or a test shows more."""
COMPILED_OFTEN = ("qwen_image", "stable_diffusion_3", "wan")
"""Kinds that `make test` compiles; `make test-all` compiles all."""
assert set(COMPILED_OFTEN) <= set(MAKERS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("kind", MAKERS)
def test_every_familys_ratio_is_exactly_one(
    kind: str, mode: str, dtype: str, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """Without another update, so that the trainer's policy is the rollout's in all rows."""
    spec = make_spec(
        make_tiny(kind, tmp_path / "model"),
        model={"dtype": dtype},
        rollout={"prompts_per_step": 2, **SETTINGS.get(kind, {})},
        trainer={"mode": mode, "lora": {"rank": 2}, "gradient_checkpointing": "full" if mode == "lora" else "none"},
    )
    metrics = make_worker(spec, ranks, files, tmp_path).train(Drawer(spec).draw(files, 0)).metrics
    assert metrics["rollout_corr/ratio_min"] == metrics["rollout_corr/ratio_max"] == 1.0
    assert metrics["actor/ratio_min"] == metrics["actor/ratio_max"] == 1.0
    assert metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    "kind", [one if one in COMPILED_OFTEN else pytest.param(one, marks=pytest.mark.long) for one in MAKERS]
)
def test_every_familys_checkpointed_blocks_compile_without_a_break(
    kind: str, ranks: Ranks, files: SyncBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A break would leave a whole block to eager."""
    monkeypatch.setattr(engine, "compile_blocks", partial(compile_blocks, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = []
    for is_compiled in (False, True):
        spec = make_spec(
            make_tiny(kind, tmp_path / f"model-{is_compiled}"),
            model={"dtype": "bfloat16"},
            rollout={"prompts_per_step": 2, **SETTINGS.get(kind, {})},
            trainer={
                "mode": "full",
                "gradient_checkpointing": "full",
                "compile": is_compiled,
                "deterministic": False,
            },
        )
        found.append(make_worker(spec, ranks, files, tmp_path).train(Drawer(spec).draw(files, 0)).metrics)
    assert found[1]["actor/grad_norm"] == pytest.approx(found[0]["actor/grad_norm"], rel=1e-3)
    assert torch._dynamo.utils.counters["graph_break"] == {}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", MAKERS)
def test_every_family_learns_from_final_latents(kind: str, ranks: Ranks, files: SyncBlobs, tmp_path: Path) -> None:
    """The old policy is the trained one at the first step, so both velocities at one noise level are the same bits."""
    spec = make_spec(
        make_tiny(kind, tmp_path / "model"),
        algorithm={"name": "diffusion_nft", "num_noise_levels": 2, "kl_coef": 0.1},
        rollout={"prompts_per_step": 2, **SETTINGS.get(kind, {})},
        trainer={"mode": "lora", "lora": {"rank": 2}},
    )
    metrics = make_worker(spec, ranks, files, tmp_path).train(Drawer(spec).draw(files, 0)).metrics
    assert metrics["actor/old_deviation"] == metrics["actor/kl_loss"] == 0.0
    assert metrics["actor/grad_norm"] > 0
    assert not any(name.startswith(("rollout_corr", "actor/ratio")) for name in metrics)
