"""Reports a running job to people: one row of metrics per step, progress, samples with their scores, validations.

Metrics have the names that the field uses in its charts (docs/metrics.md). Nothing here decides anything.
"""

import asyncio
import contextlib
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any

from flowfleet.api.jobs import Checkpoint
from flowfleet.media.image_stats import ImageStats, image_stats
from flowfleet.process.clock import steady_time
from flowfleet.process.telemetry import JobMetrics
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import common_pb2, trainer_pb2
from services.controller.job.context import JobCore
from services.controller.job.credit import left_out_reason
from services.controller.job.machine import events as ev
from services.controller.job.machine import validation_limits
from services.controller.job.machine.batch import Batch, with_dropped
from services.controller.job.reporting.metrics_file import METRICS_FILE, MetricsFile
from services.controller.job.shadow_queue import ShadowQueue
from services.controller.rewards.job_rewards import SampleScore
from services.controller.rewards.rows import source_rows
from services.controller.store.credits import Trained
from services.controller.store.records import SampleRecord, Validation

RECENT_STEPS = 20


@dataclass(frozen=True)
class ValidationPart:
    """Some held-out prompts at one version, in prompt order."""

    samples: list[common_pb2.Sample]
    verdicts: list[SampleScore]
    media: list[bytes]
    origin: str = ""
    """Name of their source."""


class Reports:
    """Reports of one job. The durations of recent steps are its only memory."""

    def __init__(self, job: JobCore, metrics: JobMetrics, shadows: ShadowQueue) -> None:
        self._job, self._metrics, self._shadows = job, metrics, shadows
        self._file = MetricsFile(job.directory / METRICS_FILE)
        self._durations: deque[float] = deque(maxlen=RECENT_STEPS)
        self._publish: dict[str, float] = {}

    async def close(self) -> None:
        await self._shadows.close()

    @property
    def first_offered(self) -> int:
        """First step of whose pictures a shadow has yet to score some, `ALL_STEPS` where none has."""
        return self._shadows.first_offered

    async def scored(
        self, samples: Sequence[common_pb2.Sample], prompts: Sequence[Prompt], verdicts: Sequence[SampleScore]
    ) -> None:
        """Records samples, scored or dropped, for people to look at, and offers them to the shadows."""
        rows = zip(samples, prompts, verdicts, strict=True)
        await self._job.store.samples.put(self._job.job_id, *(_sample_record(*row) for row in rows))
        await self._shadows.offer(samples, prompts, verdicts)

    def published(self, responses: Sequence[trainer_pb2.PublishWeightsResponse], seconds: float) -> None:
        """Records what publishing a version took, in `seconds` since the first replica was asked."""
        self._publish = {
            "timing_s/update_weights": seconds,
            "timing_s/drain": max(response.drain_seconds for response in responses),
            "timing_s/transfer": sum(response.update_seconds for response in responses),
            "perf/published_bytes": float(max(response.bytes for response in responses)),
        }

    async def best_before(self, version: int) -> list[int]:
        """Steps of the earlier checkpoints that stay for their held-out reward."""
        job = self._job
        saved = {one.step for one in await job.store.history.checkpoints(job.job_id) if one.step < version}
        return best_steps(saved, await job.store.history.validations(job.job_id), job.spec.schedule.keep_best)

    async def checkpointed(self, version: int, path: str, keep: Collection[int]) -> None:
        job = self._job
        record = Checkpoint(step=version, path=path, created_at=datetime.now(UTC))
        await job.store.history.add_checkpoint(job.job_id, record, keep_last=job.spec.schedule.keep_last, keep=keep)

    async def trained(self, request: trainer_pb2.TrainStepRequest, result: trainer_pb2.TrainStepResponse) -> None:
        """The row of a step, after its update and before the version counts up."""
        job, state, step = self._job, self._job.machine.state, request.step
        batch, now = state.batches[step], steady_time()
        duration = max(1e-3, now - (state.trained_at or batch.opened_at))  # another controller may have stamped those
        self._durations.append(duration)
        num_scored = batch.count("scored")
        row = {
            **result.metrics,
            **batch.figures,
            **_timings(batch, now, duration),
            **self._publish,
            "critic/rewards/revision": float(job.machine.rewards_number_at(step)),
            "perf/throughput": num_scored / duration / self._num_devices(),
            "training/samples": float(state.samples_trained + batch.num_trained),
            "training/samples_dropped": float(sum(state.samples_dropped.values()) + batch.num_left_out),
        }
        await job.store.history.put_metrics(job.job_id, step, row)
        await asyncio.to_thread(self._file.append, "step", step, row)
        await job.store.events.append(job.job_id, "trained", {"step": step, **batch.spread}, once=f"trained-{step}")
        self._metrics.observe(job.job_id, row)
        await job.store.credits.put(job.job_id, step, _trained(request, result))
        reward = row.get("critic/rewards/mean") if num_scored else None
        await job.store.lists.add_point(job.job_id, step, reward)
        await self._progress(step + 1, batch, reward)

    async def validated(self, version: int, parts: Sequence[ValidationPart]) -> ev.Validated:
        """The row of a validation: mean reward, and as guards against reward hacking image statistics, of videos those
        of the first frames, and how far watched rewards disagree. A total that goes without a reward is not in the
        mean."""
        job = self._job
        verdicts = [verdict for part in parts for verdict in part.verdicts]
        scores = [verdict.score for verdict in verdicts if verdict.score is not None and not verdict.skipped]
        media = [
            (data, sample.media_type) for part in parts for data, sample in zip(part.media, part.samples, strict=True)
        ]
        stats = await asyncio.to_thread(_image_stats, media)
        reward = _mean(scores) if scores else None
        row = {
            "val/reward": float("nan") if reward is None else reward,
            **({validation_limits.REWARD_STD: statistics.pstdev(scores)} if scores else {}),
            validation_limits.NUM_SCORED: float(len(scores)),
            "val/num_prompts": float(len({sample.id.group for part in parts for sample in part.samples})),
            **source_rows(
                "val-core",
                job.spec.data,
                job.machine.rewards_at(version),
                [one.rewards for one in verdicts],
                [None if one.skipped else one.score for one in verdicts],
                [part.origin for part in parts for _ in part.verdicts],
            ),
            "val/edge_density": _mean([item.edge_density for item in stats]),
            "val/colour_entropy": _mean([item.colour_entropy for item in stats]),
        }
        revision = job.machine.rewards_number_at(version)
        validation = Validation(version=version, reward=reward, revision=revision, values=_finite(row))
        validations = await self._comparable(validation)
        watched = validation_limits.watched(job.machine.rewards_at(version))
        name, far = validation_limits.largest_disagreement(validations, watched) or ("", None)
        best, fallen = validation_limits.reward_drop(validations) or (0, None)
        for metric, value in ((validation_limits.DISAGREEMENT, far), (validation_limits.REWARD_DROP, fallen)):
            if value is not None:
                row[metric] = validation.values[metric] = value
        await job.store.events.append(
            job.job_id, "validation", {"version": version, **_finite(row)}, once=f"val-{version}"
        )
        await job.store.history.add_validation(job.job_id, validation)
        known = [one.reward for one in validations if one.reward is not None]
        most: dict[str, Any] = {"held_out_best": max(known)} if known else {}
        await job.store.jobs.update_progress(job.job_id, held_out_reward=reward, **most)
        await job.store.history.put_metrics(job.job_id, version, row)
        await asyncio.to_thread(self._file.append, "version", version, row)
        self._metrics.observe(job.job_id, row)
        return ev.Validated(
            version=version, reward=reward, disagreement=far, parted=name, reward_drop=fallen, best=best
        )

    async def _comparable(self, newest: Validation) -> list[Validation]:
        """The complete validations up to the newest by the same revision of the rewards, by version; none where the
        newest is not."""
        found = await self._job.store.history.validations(self._job.job_id)
        before = [one for one in found if one.version < newest.version and one.revision == newest.revision]
        compared = validation_limits.complete([*before, newest])
        return compared if compared[-1] is newest else []

    def _num_devices(self) -> int:
        """Accelerators of the job: one a trainer rank, and those of its live replicas."""
        return self._job.spec.trainer.world_size + self._job.pool.num_devices

    async def _progress(self, version: int, batch: Batch, reward: float | None) -> None:
        job, recent = self._job, statistics.median(self._durations)
        state = job.machine.state
        await job.store.jobs.update_progress(
            job.job_id,
            step=version,
            reward=reward,
            policy_version=version,
            images_per_second=batch.count("scored") / recent,
            eta_s=recent * (job.machine.steps - version),
            samples_trained=state.samples_trained + batch.num_trained,
            samples_dropped=with_dropped(state.samples_dropped, left_out_reason(job.spec), batch.num_left_out),
            drop_causes=state.drop_causes,
        )


def _trained(request: trainer_pb2.TrainStepRequest, result: trainer_pb2.TrainStepResponse) -> list[Trained]:
    """Samples of an update with advantage and ratio. A replayed result and some losses have no ratios."""
    ratios: Sequence[float | None] = result.ratios if len(result.ratios) == len(request.samples) else []
    rows = zip_longest(request.samples, ratios)
    return [Trained(one.sample.id.group, one.sample.id.index, one.advantage, ratio) for one, ratio in rows]


def best_steps(saved: Collection[int], validations: Sequence[Validation], number: int) -> list[int]:
    """Steps of the `number` best complete validations that have a checkpoint, the best first; of equals the newer.
    Compares those by the newest revision of the rewards alone."""
    newest = max((one.revision for one in validations if one.reward is not None and one.version in saved), default=0)
    whole = validation_limits.complete([one for one in validations if one.revision == newest])
    known = [(one.reward, one.version) for one in whole if one.reward is not None and one.version in saved]
    return [step for _, step in sorted(known, reverse=True)[:number]]


def _timings(batch: Batch, now: float, duration: float) -> dict[str, float]:
    """Seconds of a step by phase; `reward` is what scoring adds after the last sample is in."""
    sampled = batch.sampled_at or batch.opened_at
    scored = batch.scored_at or sampled
    ready = batch.ready_at or scored
    return {
        "timing_s/gen": sampled - batch.opened_at,
        "timing_s/reward": max(0.0, scored - sampled),
        "timing_s/adv": max(0.0, ready - scored),
        "timing_s/train": now - ready,
        "timing_s/step": duration,
        "timing_per_image_ms/step": 1000 * duration / max(1, batch.count("scored")),
    }


def _image_stats(media: Sequence[tuple[bytes, str]]) -> list[ImageStats]:
    """Image statistics of the (file, media type) pairs that can be decoded; a broken one has no score either, and is
    counted there."""
    found = []
    for data, media_type in media:
        with contextlib.suppress(ValueError):
            found.append(image_stats(data, media_type))
    return found


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else float("nan")


def _finite(row: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if value == value else None for name, value in row.items()}


def _sample_record(sample: common_pb2.Sample, prompt: Prompt, verdict: SampleScore) -> SampleRecord:
    return SampleRecord(
        step=sample.id.step,
        group=sample.id.group,
        index=sample.id.index,
        purpose="validate" if sample.purpose == common_pb2.PURPOSE_VALIDATE else "train",
        prompt=prompt.text,
        source=prompt.origin,
        reward=verdict.score,
        scores=dict(verdict.scores),
        versions=dict(verdict.versions),
        gated_by=verdict.gated_by,
        policy_version=sample.policy_version,
        seed=sample.seed,
        drop_reason=verdict.reason,
        drop_cause=verdict.cause,
        media_uri=sample.media.uri,
        media_size_bytes=sample.media.size_bytes,
        media_sha256=sample.media.sha256,
        media_type=sample.media_type,
        replica=sample.replica_id,
    )
