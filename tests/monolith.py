"""A job in one process: the services' own functions, called by one another.

No gRPC, Redis or blobs here. This is what the services are measured against: the same sampler, scorer, advantages,
trainer, threads and accelerators. Pictures go to the scorer as the services' files, tensors to the trainer as they are.

`Monolith.step` runs the phases one after the other, as services do that are strictly on-policy. `Overlap` runs them as
services do with `max_staleness = 1`: one thread samples step s + 1 while this one trains on step s, and new weights are
copied from device to device between two batches. After the last step the sampler is at work on the next, as in a job
that continues: a step is measured whole, with its wait for a batch of the sampler's. The first step is over before the
second is sampled: while one thread compiles, torch lets no other call what is compiled.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from flowfleet.algorithms.advantages import group_advantages
from flowfleet.algorithms.settings import AdvantageSettings
from flowfleet.algorithms.windows import noisy_steps, trained_steps
from flowfleet.data.trajectories import Trajectory
from flowfleet.hardware import devices
from flowfleet.hardware.accelerators import visible_devices
from flowfleet.job.spec import JobSpec
from flowfleet.media.files import encode_media
from flowfleet.models.embeds import PromptEmbeds, concat_embeds
from flowfleet.models.registry import adapter_for
from flowfleet.process.service import usable_cpus
from flowfleet.process.telemetry import Timings
from flowfleet.rewards.requests import EncodedSample
from flowfleet.seeds import sample_seed
from flowfleet.weights import lora, weights
from services.reward.execution.evaluator import Evaluator
from services.reward.execution.pool import ProcessPool, default_processes
from services.reward.metrics import RewardMetrics
from services.reward.scorer import Score, Scorer
from services.reward.scorers import make
from services.rollout.engines import acceleration
from services.rollout.engines.base import (
    GeneratedBatch,
    GeneratedSample,
    GenerationRequest,
    Noise,
    PromptGroup,
    Sampling,
)
from services.rollout.engines.sampler import Sampler, batches
from services.trainer.model.engine import Engine, lora_spec, model_spec
from services.trainer.parallel.ranks import Ranks
from services.trainer.step.batches import MicroBatch, plan_passes
from services.trainer.step.inputs import StepsBatch
from services.trainer.step.update import StepTrainer

Samples = list[tuple[GeneratedBatch, GeneratedSample]]
Rows = list[dict[str, float]]
Rewards = Sequence[float | None]
"""A sample's; none where the scorer gave none: it is left out of the update, as the services do."""


class Monolith:
    """A job of a policy loss with one reward, in this process. Rollout and trainer share an accelerator, or have
    one each where there are two: the first is the rollout's."""

    def __init__(self, spec: JobSpec, prompts: Sequence[str], num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.spec, self._prompts = spec, prompts
        rollout_device = devices.pick_device(0)
        os.environ["LOCAL_RANK"] = "1" if len(visible_devices()) > 1 else "0"
        self.engine = Engine(spec, Ranks())
        self.engine.shard()
        self._adapter = adapter_for(spec.model.path).load(
            spec.model.path,
            dtype=weights.dtype_of(spec.model.dtype),
            device=rollout_device,
            load_format=spec.model.load_format,
        )
        self._adapter.limit_tokens(spec.model.max_sequence_length)
        part = spec.rollout
        experts, quantization = self._adapter.experts, model_spec(spec).quantization
        self._rollout_device = rollout_device
        with devices.bound(rollout_device):
            acceleration.accelerate(experts, compile=part.compile, quantization=quantization)
            if self.engine.is_lora:
                lora.install_lora(experts, lora_spec(spec))
                acceleration.adapt(experts, compile=part.compile, merged=lora_spec(spec).merged)
        self._sampler = Sampler(self._adapter)
        (reward,) = spec.rewards
        scorer = make(reward, {}, num_threads)
        self._params = scorer.parse(spec.rewards[reward].params)
        self._evaluate = _evaluator(reward, num_threads)
        self._batches = ThreadPoolExecutor(2, "reward")
        self.publish()

    def step(self, step: int) -> dict[str, float]:
        """Runs all phases in turn. Returns seconds by phase, `step` being the whole."""
        timings = Timings()
        start = time.perf_counter()
        with timings("gen"):
            made = list(self.sample(step))
        with timings("reward"):
            rewards = [value for batch in made for value in self.score(step, batch).result()]
        with timings("update_actor"):
            self.train(step, made, rewards)
        with timings("update_weights"):
            self.publish()
        return timings.seconds | {"step": time.perf_counter() - start}

    def sample(self, step: int) -> Iterator[GeneratedBatch]:
        """Batch by batch."""
        part = self.spec.rollout
        size = max(1, part.batch_size // part.group_size)
        numbers = range(part.prompts_per_step)
        for start in range(0, part.prompts_per_step, size):
            request = self._request(step, numbers[start : start + size])
            encoded = self._sampler.encode(request)
            for rows in batches(request, part.batch_size):
                yield self._sampler.sample(request, encoded, rows, lambda: None)

    def score(self, step: int, batch: GeneratedBatch) -> Future[Rewards]:
        """Runs in parallel with whatever comes next."""
        return self._batches.submit(self._score, step, batch)

    def train(self, step: int, made: Sequence[GeneratedBatch], rewards: Rewards) -> dict[str, float]:
        """Advantages and the update, by the samples that have a score; seconds of the trainer's phases."""
        every: Samples = [(batch, sample) for batch in made for sample in batch.samples]
        scored = [(it, reward) for it, reward in zip(every, rewards, strict=True) if reward is not None]
        if not scored:
            raise ValueError(f"step {step}: no sample has a score")
        samples, values = [it for it, _ in scored], [reward for _, reward in scored]
        part = self.spec.algorithm.of(AdvantageSettings)
        groups = [sample.group for _, sample in samples]
        advantages, _ = group_advantages(values, groups, std=part.advantage_std, clamp=part.advantage_clamp)
        passes = [
            (updates, [[self._batch(micro, samples, advantages) for micro in update.by_rank[0]] for update in updates])
            for updates in plan_passes([(sample.group, sample.index) for _, sample in samples], self.spec, step, 1)
        ]
        trainer = StepTrainer(self.engine, step, len(samples), trained_steps(self.spec, step))
        timings = Timings()
        trainer.train(passes, timings)
        return dict(timings.seconds)

    def publish(self) -> None:
        """From device to device."""
        if self.engine.is_lora:
            lora.load_adapter(self._adapter.experts, dict(self.engine.full_tensors()))
            with devices.bound(self._rollout_device):
                acceleration.merge(self._adapter.experts)
            return
        copy = weights.copy_into(weights.full_parameters(self._adapter.experts))
        for name, value in self.engine.full_tensors():
            copy(name, value)
        with devices.bound(self._rollout_device):
            acceleration.refresh(self._adapter.experts)

    def _request(self, step: int, groups: Sequence[int]) -> GenerationRequest:
        part = self.spec.rollout
        indices = tuple(range(part.group_size))
        return GenerationRequest(
            groups=tuple(
                PromptGroup(
                    group,
                    self._prompt(step, group),
                    indices,
                    tuple(sample_seed(self.spec.seed, step, group, index) for index in indices),
                )
                for group in groups
            ),
            sampling=Sampling(
                part.size,
                part.num_inference_steps,
                part.guidance,
                part.negative_prompt,
                sampler=part.sampler,
                shift=part.shift,
            ),
            noise=Noise(
                part.noise.type,
                part.noise.eta,
                noisy_steps(self.spec, step),
                part.noise.share_initial_noise,
                part.tail_steps or 0,
                trained_steps(self.spec, step),
            ),
            record="steps",
        )

    def _score(self, step: int, batch: GeneratedBatch) -> Rewards:
        asked = []
        for sample in batch.samples:
            media, media_type = encode_media(sample.frames)
            asked.append(EncodedSample(media, media_type, self._prompt(step, sample.group)))
        outcomes = self._evaluate(asked, self._params)
        return [outcome.value if isinstance(outcome, Score) else None for outcome in outcomes]

    def _batch(self, micro: MicroBatch, samples: Samples, advantages: np.ndarray) -> StepsBatch:
        device = self.engine.ranks.device
        rows = [samples[row] for row in micro.rows]
        records = [sample.record for _, sample in rows if isinstance(sample.record, Trajectory)]
        return StepsBatch(
            rows=micro.rows,
            is_padding=micro.is_padding,
            size=self.spec.rollout.size,
            latents=torch.stack([record.latents for record in records], 1).to(device),
            next_latents=torch.stack([record.next_latents for record in records], 1).to(device),
            rollout_log_probs=torch.stack([record.log_probs for record in records], 1).to(device),
            advantages=torch.tensor([advantages[row] for row in micro.rows], dtype=torch.float32, device=device),
            ties=torch.ones(len(rows), device=device),
            prompts=concat_embeds([batch.embeds[sample.group] for batch, sample in rows]).to(device),
            negative=_negative(rows[0], device),
        )

    def _prompt(self, step: int, group: int) -> str:
        return self._prompts[(step * self.spec.rollout.prompts_per_step + group) % len(self._prompts)]


class Overlap:
    """`max_staleness = 1`: steps on the calling thread, sampling on another."""

    def __init__(self, monolith: Monolith) -> None:
        self._monolith = monolith
        self._version = 0
        self._is_publishing = False
        self._is_done = False
        self._changed = threading.Condition()
        self._device = threading.Lock()

    def run(self, num_steps: int, told: Callable[[int, float], None] = lambda step, seconds: None) -> Rows:
        """Rows of metrics by the services' names. `told`: a step that is done, and its seconds."""
        rows, ended = [], time.perf_counter()
        with ThreadPoolExecutor(1, "sampling") as sampling:
            pending = [sampling.submit(self._sample, step) for step in range(num_steps + 1)]
            try:
                for step, made in enumerate(pending[:num_steps]):
                    rendered, scores = made.result()
                    rewards = [value for score in scores for value in score.result()]
                    row = self._monolith.train(step, rendered, rewards)
                    start = time.perf_counter()
                    self._publish()
                    row["update_weights"] = time.perf_counter() - start
                    ended, begun = time.perf_counter(), ended
                    rows.append({f"timing_s/{name}": value for name, value in (row | {"step": ended - begun}).items()})
                    told(step, ended - begun)
            finally:
                with self._changed:
                    self._is_done = True
                    self._changed.notify_all()
        return rows

    def _sample(self, step: int) -> tuple[list[GeneratedBatch], list[Future[Rewards]]]:
        made, scores = list[GeneratedBatch](), list[Future[Rewards]]()
        batches_left = self._monolith.sample(step)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_done or self._may_sample(step))
            with self._device:
                batch = None if self._is_done else next(batches_left, None)
            if batch is None:
                return made, scores
            made.append(batch)
            scores.append(self._monolith.score(step, batch))

    def _may_sample(self, step: int) -> bool:
        return not self._is_publishing and self._version >= max(step - 1, min(step, 1))

    def _publish(self) -> None:
        """Between two batches of the sampler."""
        self._is_publishing = True
        with self._device:
            self._monolith.publish()
        with self._changed:
            self._is_publishing = False
            self._version += 1
            self._changed.notify_all()


def run_in_one_process(spec: JobSpec, num_steps: int) -> Rows:
    """Rows of metrics of a job with `max_staleness = 1`, by the services' names, told on stderr as they come. Needs
    `trainer.world_size = 1`."""
    if spec.trainer.world_size != 1 or spec.schedule.max_staleness != 1:
        raise ValueError("in one process there is one trainer rank, and samples are up to one version stale")
    monolith = Monolith(spec, Path(spec.data.each[0].path).read_text().splitlines(), usable_cpus())
    return Overlap(monolith).run(num_steps, _told)


def _told(step: int, seconds: float) -> None:
    print(f"in one process, step {step}: {seconds:.1f} s", file=sys.stderr, flush=True)


def _evaluator(reward: str, num_threads: int) -> Evaluator[Any] | ProcessPool:
    """Builds the same evaluator as the reward service."""
    scorer = make(reward, {}, num_threads)
    assert isinstance(scorer, Scorer)
    processes = default_processes(scorer.heavy)
    if processes == 1:
        return Evaluator(scorer, num_threads)
    metrics = RewardMetrics(scorer.name, scorer.score_range, CollectorRegistry())
    return ProcessPool(partial(make, reward, {}, 1), processes, metrics)


def _negative(row: tuple[GeneratedBatch, GeneratedSample], device: torch.device) -> PromptEmbeds | None:
    """Returns the row that all samples share; none without guidance."""
    batch, sample = row
    return batch.negative[sample.group].to(device) if batch.negative else None
