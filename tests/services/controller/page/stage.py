"""Jobs for the page to show: written into a real store as the part that runs jobs would, pictures included.

Three jobs paint signs. "hacked" is paid for small files alone, so its words fade from step 4 on; "guarded" is paid for
legible words too. "queued" waits behind them.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFilter

from flowfleet.data.blobs import open_blobs
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.redis import keys
from services.controller.store.records import SampleRecord, Validation
from services.controller.store.store import Store

STEPS = 12
HACKED_FROM = 4
GROUPS, GROUP = 3, 4
COLORS = {"red": "#b03030", "green": "#2f7d43", "blue": "#2b57a7", "yellow": "#a8861a"}
WORDS = ("RWF", "ALK", "K7QX", "HP0E", "UJF", "T4MB", "ZED", "OWL9", "GRID", "NOVA")
KEPT_S = 3600


@dataclass(frozen=True)
class Stage:
    hacked: str
    guarded: str
    queued: str


def settings(directory: Path, name: str, **parts: Any) -> JobSpec:
    """A job whose files exist."""
    model, prompts = directory / "model", directory / "prompts.txt"
    model.mkdir(exist_ok=True)
    (model / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    prompts.write_text('A red sign that says "K7QX"\n')
    data = {"train": str(prompts), "validation": str(prompts)}
    rewards = {"jpeg_compressibility": {"weight": 1.0}, "ocr": {"weight": 0.0}}
    return parse_job({"name": name, "model": {"path": str(model)}, "rewards": rewards, "data": data, **parts})


def sign(prompt: int, fade: float, seed: int) -> bytes:
    """A PNG of 64 pixels: a sign with its word, from legible (fade 0) to blank (1)."""
    color, word = list(COLORS.values())[prompt % len(COLORS)], WORDS[prompt % len(WORDS)]
    shift = random.Random(seed).randint(-3, 3)
    picture = Image.new("RGB", (64, 64), "#d9d5cb")
    draw = ImageDraw.Draw(picture)
    draw.rectangle((5, 12, 58, 50), fill=color)
    draw.rectangle((30, 50, 33, 63), fill="#6b6459")
    draw.text((32 + shift, 31), word, fill="#fdfcf8", anchor="mm", font_size=18)
    faded = Image.blend(picture, Image.new("RGB", picture.size, color), 0.85 * fade).filter(
        ImageFilter.GaussianBlur(3 * fade)
    )
    data = io.BytesIO()
    faded.save(data, "PNG")
    return data.getvalue()


def seed_of(group: int, index: int) -> int:
    """A seed with more digits than a browser's numbers hold."""
    return 2**62 + 100 * group + index


def words_of(prompt: int) -> str:
    return f'A {list(COLORS)[prompt % len(COLORS)]} sign that says "{WORDS[prompt % len(WORDS)]}"'


async def set_stage(store: Store, directory: Path) -> Stage:
    guarded_rewards = {"jpeg_compressibility": {"weight": 1.0}, "ocr": {"weight": 2.0}}
    parts: dict[str, Any] = {"schedule": {"steps": STEPS, "validate_every": 4}}
    hacked = await run_job(store, settings(directory, "signs-small-files", **parts), is_hacked=True)
    second = {"rewards": guarded_rewards, "rollout": {"pool": "second"}}
    guarded = await run_job(store, settings(directory, "signs-guarded", **second, **parts), is_hacked=False)
    queued = await create(store, settings(directory, "signs-longer", schedule={"steps": 60}))
    await store.jobs.update_progress(hacked, phase="score", step=STEPS - 1)
    return Stage(hacked, guarded, queued)


async def create(store: Store, spec: JobSpec) -> str:
    return (await store.jobs.create(spec))[0].id


async def run_job(store: Store, spec: JobSpec, *, is_hacked: bool) -> str:
    """A job that runs and has done all steps but one."""
    job_id = await create(store, spec)
    await store.jobs.set_status(job_id, "starting")
    await store.jobs.set_status(job_id, "running")
    await _history(store, job_id, is_hacked)
    return job_id


def fade_at(step: int, is_hacked: bool) -> float:
    return min(1.0, max(0.0, (step - HACKED_FROM + 1) / 5)) if is_hacked else 0.0


async def _history(store: Store, job_id: str, is_hacked: bool) -> None:
    for step in range(STEPS - 1):
        await add_step(store, job_id, step, fade_at(step, is_hacked))
        if step % 4 == 0:
            await add_validation(store, job_id, step, fade_at(step, is_hacked), range(len(WORDS)))
    row: dict[str, Any] = {"step": STEPS - 1, "reward": -1.0 if is_hacked else -1.9, "held_out_reward": -1.1}
    await store.jobs.update_progress(job_id, **row, images_per_second=3.2, eta_s=95.0, policy_version=STEPS - 1)


async def add_step(store: Store, job_id: str, step: int, fade: float) -> None:
    """A step's samples, its row of metrics and its point of the curve."""
    samples = [(group, index) for group in range(GROUPS) for index in range(GROUP)]
    await add_samples(store, job_id, step, "train", samples, fade)
    wave = math.sin(step * 1.7)
    rewards = {"jpeg_compressibility": -2.0 + fade + 0.03 * wave, "ocr": 0.85 - 0.8 * fade + 0.02 * wave}
    await store.lists.add_point(job_id, step, rewards["jpeg_compressibility"])
    await store.history.put_metrics(
        job_id,
        step,
        {
            "critic/rewards/mean": rewards["jpeg_compressibility"],
            **{f"critic/rewards/{name}/mean": value for name, value in rewards.items()},
            "actor/ppo_kl": 0.002 + 0.001 * abs(wave),
            "actor/pg_clipfrac": 0.12 + 0.05 * wave,
            "actor/ratio_mean": 1.0 + 0.004 * wave,
            "actor/ratio_min": 0.93 + 0.01 * wave,
            "actor/ratio_max": 1.07 + 0.01 * wave,
            "actor/loss": 0.3 - 0.01 * step,
            "actor/grad_norm": 1.2 + 0.3 * wave,
            "perf/throughput": 3.1 + 0.1 * wave,
            "timing_s/gen": 5.0 + wave,
            "timing_s/reward": 1.1,
            "timing_s/adv": 0.1,
            "timing_s/train": 3.4,
            "timing_s/update_weights": 0.6,
            "timing_s/step": 10.2 + wave,
        },
    )


async def add_validation(store: Store, job_id: str, version: int, fade: float, prompts: Iterable[int]) -> None:
    await add_samples(store, job_id, version, "validate", [(prompt, 0) for prompt in prompts], fade)
    values = {
        "val/reward": -2.0 + fade,
        "val-core/rewards/ocr/mean": 0.86 - 0.8 * fade,
        "val/edge_density": 0.2 - 0.15 * fade,
        "val/colour_entropy": 2.4 - 0.9 * fade,
    }
    await store.history.add_validation(
        job_id, Validation(version=version, reward=values["val/reward"], values=dict(values))
    )
    await store.history.put_metrics(job_id, version, values)


async def add_samples(
    store: Store, job_id: str, step: int, purpose: Any, places: Iterable[tuple[int, int]], fade: float
) -> None:
    """Samples with pictures that fade."""
    blobs = open_blobs(store.link.redis)
    records = []
    for group, index in places:
        picture = sign(group, fade, 31 * group + index)
        ref = await blobs.put(keys.blob(job_id, purpose, step, group * 1000 + index), picture, ttl_s=KEPT_S)
        seen = random.Random(f"{step}/{group}/{index}").uniform(-0.1, 0.1)
        scores: dict[str, float | None] = {
            "jpeg_compressibility": -2.0 + fade + seen,
            "ocr": max(0.0, 0.85 - 0.8 * fade - seen),
        }
        records.append(
            SampleRecord(
                step=step,
                group=group,
                index=index,
                purpose=purpose,
                prompt=words_of(group),
                reward=scores["jpeg_compressibility"],
                scores=scores,
                versions={"ocr": "ocr 3", "jpeg_compressibility": "jpeg 2"},
                policy_version=step,
                seed=seed_of(group, index),
                media_uri=ref.uri,
                media_size_bytes=ref.size_bytes,
                media_sha256=ref.sha256,
            )
        )
    await store.samples.put(job_id, *records)
