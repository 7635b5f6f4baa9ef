"""A training step of the whole plugin: CISPO on `sit_sde` on Ovis-Image, by the rollout's sampler and the trainer."""

from pathlib import Path

from tiny_ovis_image import make_tiny_ovis_image

from flowfleet.data.blobs import FsspecBlobs
from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.steps import Drawer, make_spec
from tests.services.trainer.workers import make_worker


def test_the_rollouts_log_probs_are_the_trainers_and_the_second_update_has_moved(tmp_path: Path) -> None:
    spec = make_spec(
        make_tiny_ovis_image(tmp_path / "model"), algorithm={"name": "cispo"}, rollout={"guidance_scale": 3.0}
    )
    assert (spec.rollout.noise.type, spec.algorithm.loss, spec.trainer.updates_per_step) == ("sit_sde", "cispo", 2)
    blobs, ranks = FsspecBlobs(f"file://{tmp_path}/blobs"), Ranks()
    try:
        metrics = make_worker(spec, ranks, blobs, tmp_path).train(Drawer(spec).draw(blobs, 0)).metrics
    finally:
        ranks.close()
    assert metrics["rollout_corr/ratio_min"] == metrics["rollout_corr/ratio_max"] == 1.0
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/ratio_min"] < 1 < metrics["actor/ratio_max"]
