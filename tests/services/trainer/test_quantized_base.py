"""A job on a float8 base: rollout and trainer compute the same policy, and the adapter is trained and resumed."""

from pathlib import Path

import pytest
import torch

from flowfleet.data.blobs import SyncBlobs
from flowfleet.models import level_tables
from flowfleet.proto import trainer_pb2
from flowfleet.quantization import layers
from services.rollout.engines.acceleration import blocks
from services.trainer.model.engine import lora_spec, model_spec
from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.steps import JOB, Drawer, make_spec
from tests.services.trainer.workers import make_worker, state_of
from tests.tiny_models import make_tiny


@pytest.mark.parametrize("kind", ["qwen_image", "hunyuan_image3"])
def test_the_trainer_recomputes_the_rollouts_log_probs_bit_for_bit(
    kind: str,
    ranks: Ranks,
    files: SyncBlobs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers, "MIN_SIZE", 16)
    model = {"dtype": "bfloat16", "base": "fp8"}
    spec = make_spec(make_tiny(kind, tmp_path / "model"), model=model)
    assert model_spec(spec).quantization == "fp8_base"
    drawer = Drawer(spec)
    assert layers.replace_weights(blocks(drawer.adapter.transformer).values()) > 0
    if drawer.adapter.level_layers is not None:
        level_tables.install(drawer.adapter.transformer, drawer.adapter.level_layers)
    worker = make_worker(spec, ranks, files, tmp_path)
    for step in range(2):  # in the second the adapter is more than nothing
        before = state_of(worker)
        drawer.load(before, lora_spec(spec))
        metrics = worker.train(drawer.draw(files, step)).metrics
        assert metrics["rollout_corr/ratio_max_abs_dev"] == 0
        assert metrics["actor/grad_norm"] > 0
        after = state_of(worker)
        assert any(not torch.equal(after[name], before[name]) for name in before)
    worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
    resumed = state_of(make_worker(spec, ranks, files, tmp_path))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in after.items())
