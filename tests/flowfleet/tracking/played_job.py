"""A job that a test plays into the store, step by step, and a follower of it as a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowfleet.api.jobs import JobStatus
from flowfleet.client import Client
from flowfleet.data.blobs import open_blobs
from flowfleet.media.files import encode_media
from flowfleet.redis import keys
from flowfleet.tracking.place import Place, State
from services.controller.job.reporting.figures import histograms
from services.controller.store.records import SampleRecord
from services.controller.store.store import Store
from tests.flowfleet.idle_controller import in_store, job_settings

PROMPTS = ('a sign that says "K7QX"', "a boat | a moat")
NUM_FRAMES = 5


def reward(step: int) -> float:
    return step / 8


def rewards_of(step: int) -> list[float]:
    """Eight samples; a power of two keeps sums exact in TensorBoard's float32."""
    return [step + number / 8 for number in range(8)]


class PlayedJob:
    """Trains a step, or validates a version, whenever the test says so."""

    def __init__(self, redis_url: str, client: Client, folder: Path, num_frames: int = 1) -> None:
        self._redis_url = redis_url
        self._num_frames = num_frames
        self.id = client.submit(job_settings(folder, name="played", seed=3)).id
        self._act(lambda store: store.jobs.set_status(self.id, JobStatus.RUNNING))

    def train(self, *steps: int) -> None:
        async def act(store: Store) -> None:
            for step in steps:
                row = {"critic/rewards/mean": reward(step), "actor/loss": float("nan"), "timing_s/step": 0.5}
                await store.history.put_metrics(self.id, step, row)
                drawn = histograms({"rewards": rewards_of(step), "advantages": [-1.0, 1.0]})
                await store.events.append(self.id, "trained", {"step": step, **drawn}, once=f"trained-{step}")
                await store.jobs.update_progress(self.id, step=step + 1)

        self._act(act)

    def validate(self, version: int) -> None:
        async def act(store: Store) -> None:
            row = {"val/reward": reward(version), "val-core/ocr/mean": 0.25}
            for group, prompt in enumerate(PROMPTS):
                await store.samples.put(self.id, await self._sample(store, version, group, prompt))
            await store.events.append(self.id, "validation", {"version": version, **row}, once=f"val-{version}")
            await store.history.put_metrics(self.id, version, row)

        self._act(act)

    async def _sample(self, store: Store, version: int, group: int, prompt: str) -> SampleRecord:
        frames = np.full((self._num_frames, 32, 48, 3), 40 * version + group, np.uint8)
        data, media_type = encode_media(frames)
        ref = await open_blobs(store.link.redis).put(keys.blob(self.id, "media", version, group), data, ttl_s=60)
        return SampleRecord(
            step=version,
            group=group,
            index=0,
            purpose="validate",
            prompt=prompt,
            reward=reward(version),
            scores={"ocr": reward(version), "ocr.exact": 1.0},
            media_uri=ref.uri,
            media_size_bytes=ref.size_bytes,
            media_sha256=ref.sha256,
            media_type=media_type,
        )

    def end(self, status: JobStatus = JobStatus.SUCCEEDED) -> None:
        self._act(lambda store: store.jobs.set_status(self.id, status))

    def _act(self, act: Callable[[Store], Any]) -> None:
        in_store(self._redis_url, act)


class FollowerProcess:
    """`flowfleet track` as its user starts it."""

    def __init__(
        self,
        url: str,
        job_id: str,
        flags: list[str],
        folder: Path,
        state: Path,
        env: Mapping[str, str] = {},
        python: str = sys.executable,
    ) -> None:
        self._command = [python, "-m", "flowfleet.cli.main", "track", job_id, *flags, "--url", url]
        self._folder = folder
        self._env = {**os.environ, **env}
        self._place = Place(state, job_id)
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, cwd=self._folder, env=self._env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def wait_for(self, reached: Callable[[State], bool], timeout_s: float = 60.0) -> None:
        """Returns when the place on disk says so."""
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while not reached(self._place.read()):
            assert self._process.poll() is None, self._process.communicate()[0]
            assert time.monotonic() < deadline, f"the follower is at {self._place.read()}"
            time.sleep(0.05)

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def ended(self, timeout_s: float = 60.0) -> str:
        """What it printed, when it ended by itself and well."""
        assert self._process is not None
        said, _ = self._process.communicate(timeout=timeout_s)
        assert self._process.returncode == 0, said
        return said
