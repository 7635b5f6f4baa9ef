"""The summary of a job that a real controller remembers; its history is written by the test."""

import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowfleet.api.jobs import JobEvent, JobStatus
from flowfleet.client.client import Client
from flowfleet.data.blobs import open_blobs
from flowfleet.demo.plots import Curve, Pair, before_after, reward_curve, words_of
from flowfleet.demo.results import fetch, fetch_pairs, held_out_curve, summarize, training_curve
from flowfleet.redis import keys
from services.controller.store.records import SampleRecord
from services.controller.store.store import Store
from tests.flowfleet.idle_controller import in_store, job_settings

STEPS = 2
BEFORE = (0.0, 0.5, None, 0.25)
AFTER = (1.0, 0.5, 0.75, 0.75)
REWARDS = {"ocr": {"weight": 1.0}, "watch": {"weight": 0.0, "service": "ocr"}}


def picture(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 8), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


async def play(store: Store, job_id: str) -> None:
    """Two steps of ten and eleven samples between two validations of four prompts."""
    blobs = open_blobs(store.link.redis)

    async def validate(version: int, scores: tuple[float | None, ...]) -> None:
        for group, score in enumerate(scores):
            ref = await blobs.put(keys.blob(job_id, version, group), picture(40 * group + version), ttl_s=60)
            sample = SampleRecord(
                step=version,
                group=group,
                index=0,
                purpose="validate",
                prompt=f'says "W{group}"',
                reward=score,
                scores={"watch": None if score is None else 2 * score},
                media_uri=ref.uri,
                media_size_bytes=ref.size_bytes,
                media_sha256=ref.sha256,
            )
            await store.samples.put(job_id, sample)
        known = [score for score in scores if score is not None]
        row = {"val/reward": sum(known) / len(known), "val/edge_density": 9.0, "val/colour_entropy": 3.0 + version}
        await store.events.append(job_id, "validation", {"version": version, **row})
        await store.history.put_metrics(job_id, version, row)

    await store.jobs.set_status(job_id, JobStatus.RUNNING)
    await store.jobs.update_progress(job_id, phase="rollout")
    await validate(0, BEFORE)
    for step, samples in enumerate((10, 21)):
        row = {"critic/rewards/mean": 0.3 + step / 10, "training/samples": samples, "timing_s/gen": 1.5}
        await store.history.put_metrics(job_id, step, row)
        dropped = {"reward_failed": 3}
        await store.jobs.update_progress(job_id, step=step + 1, samples_trained=samples, samples_dropped=dropped)
    await validate(STEPS, AFTER)
    await store.jobs.set_status(job_id, JobStatus.SUCCEEDED)


def test_summary_curves_and_pairs(api_url: str, redis_url: str, tmp_path: Path) -> None:
    with Client(api_url) as client:
        job = client.submit(job_settings(tmp_path, seed=5, schedule={"steps": STEPS}, rewards=REWARDS))
        in_store(redis_url, lambda store: play(store, job.id))
        outcome = fetch(client, job.id, list(client.events(job.id)))
        pairs = list(fetch_pairs(client, outcome))

    started = outcome.events[0].time - timedelta(seconds=7)
    summary = summarize(outcome, started, started + timedelta(seconds=100))

    assert summary["held_out_reward_before"] == 0.25
    assert summary["held_out_reward_after"] == 0.75
    assert summary["improvement"] == 0.5
    assert summary["held_out_prompts"] == 3  # the one without a score before is no pair
    assert (summary["samples_trained"], summary["samples_dropped"]) == (21, 3)
    assert (summary["colour_entropy_before"], summary["colour_entropy_after"]) == (3.0, 5.0)
    assert summary["seconds_by_phase"] == {"gen": 3.0}
    assert (summary["seed"], summary["job_id"], summary["total_seconds"]) == (5, job.id, 100.0)
    low, high = summary["bootstrap_ci95"]
    assert 0.0 <= low < (1.0 + 0.0 + 0.5) / 3 < high <= 1.0
    assert list(summary["watched"]) == ["watch"]
    watched = summary["watched"]["watch"]
    assert (watched["before"], watched["after"]) == (0.5, 1.5)
    assert watched["bootstrap_ci95"] == pytest.approx([2 * low, 2 * high])
    rollout, trained = (
        next(e.time for e in outcome.events if all(e.data.get(name) == value for name, value in wanted.items()))
        for wanted in ({"phase": "rollout"}, {"step": STEPS})
    )
    assert summary["training_seconds"] == (trained - rollout).total_seconds()
    assert summary["seconds_to_first_step"] == (rollout - started).total_seconds()
    assert json.loads(json.dumps(summary)) == summary

    assert training_curve(outcome.rows) == Curve([0, 10], [0.3, 0.4])
    assert held_out_curve(outcome) == Curve([0, 21], [0.25, 0.75])
    assert [(pair.prompt, pair.score_before, pair.score_after) for pair in pairs] == [
        ('says "W0"', 0.0, 1.0),
        ('says "W1"', 0.5, 0.5),
        ('says "W3"', 0.25, 0.75),
    ]
    assert pairs[2].before.shape == (8, 16, 3)
    assert (pairs[2].before[0, 0, 0], pairs[2].after[0, 0, 0]) == (120, 120 + STEPS)


def test_a_job_without_validations_has_no_summary(api_url: str, tmp_path: Path) -> None:
    with Client(api_url) as client:
        job = client.submit(job_settings(tmp_path))
        once = [JobEvent(id="1-0", type="validation", time=datetime.now(UTC), data={"version": 0})]
        with pytest.raises(ValueError, match=r"data\.validation"):
            fetch(client, job.id, once)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    """Every picture of a pair appears in the grid in its own color."""
    shades = [np.full((8, 8, 3), (200, 10 * n, 30), dtype=np.uint8) for n in range(6)]
    pairs = [Pair(f'says "W{n}"', shades[2 * n], shades[2 * n + 1], 0.5, None) for n in range(3)]
    before_after(tmp_path / "grid.png", pairs, "title", "subtitle", num_columns=2)
    reward_curve(tmp_path / "curve.png", Curve([0, 96], [0.2, 1.2]), Curve([0, 192], [0.3, 0.9]), "title", "subtitle")

    with Image.open(tmp_path / "grid.png") as image:
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 24) or []}
    assert {tuple(int(value) for value in shade[0, 0]) for shade in shades} <= colors
    with Image.open(tmp_path / "curve.png") as image:
        assert min(image.size) > 400


@pytest.mark.parametrize(
    ("prompt", "words"),
    [('A red sign that says "K7QX"', "K7QX"), ("a dog on a very long and winding road", "a dog on a very long…")],
)
def test_words_of_a_prompt(prompt: str, words: str) -> None:
    assert words_of(prompt) == words
