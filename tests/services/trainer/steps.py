"""Jobs on tiny models, and real samples to train on: drawn by the rollout's sampler, stored in a real blob store."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps

from flowfleet import plugins
from flowfleet.algorithms.registry import ALGORITHMS
from flowfleet.algorithms.settings import KlGateSettings
from flowfleet.data.blobs import SyncBlobs
from flowfleet.data.trajectories import EmbedsBlob, Trajectory
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.models.base import ModelAdapter
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.registry import adapter_for, family_of
from flowfleet.proto.common_pb2 import PURPOSE_TRAIN, BlobRef, Sample, SampleId
from flowfleet.proto.trainer_pb2 import TrainSample, TrainStepRequest
from flowfleet.redis import keys
from flowfleet.seeds import sample_seed
from flowfleet.weights.lora import install_lora, load_adapter
from flowfleet.weights.weights import dtype_of
from services.rollout.engines.base import (
    GeneratedBatch,
    GeneratedSample,
    GenerationRequest,
    Noise,
    PromptGroup,
    Sampling,
)
from services.rollout.engines.sampler import Sampler, batches

JOB = "job-1"
_IMAGE = Image.linear_gradient("L").convert("RGB").resize((40, 32))
PROMPTS = ('A red sign that says "K7"', 'A blue sign that says "QXZ4"', 'A green sign that says "A"')


def make_spec(path: Path, **parts: dict[str, Any]) -> JobSpec:
    """3 prompts × 2 samples of 32×32 pixels, 4 steps of which 2 carry noise; one batch of 4 rows and one of 2,
    one update."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(path), "dtype": "float32"},
        "data": {"train": "unused.txt"},
        "rewards": {"ocr": {}},
        "rollout": {
            "prompts_per_step": len(PROMPTS),
            "group_size": 2,
            "height": 32,
            "width": 32,
            "num_inference_steps": 4,
            "batch_size": 4,
            "window": {"strategy": "fixed", "size": 2, "low": 0},
        },
        "algorithm": {} if "name" in parts.get("algorithm", {}) else {"clip_range": 0.5},
        "trainer": {
            "micro_batch_size": 4,
            "updates_per_step": _updates(parts.get("algorithm", {}).get("name", "flow_grpo")),
            "deterministic": True,
            "threads": 1,
            "lora": {"rank": 3, "alpha": 6.0},
            "optimizer": {"lr": 1e-2},
        },
        "timeouts": {"publish_s": 60.0},
    }
    for name, part in parts.items():
        base[name] = {**base.get(name, {}), **part}
    return parse_job(base)


def _updates(algorithm: str) -> int:
    """1, or what an algorithm itself brings."""
    plugins.load()
    return int(ALGORITHMS[algorithm].defaults.get("trainer.updates_per_step", 1))


class Drawer:
    """Draws the samples of training steps as a rollout replica would, by the policy that `load` gave it."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        family = adapter_for(spec.model.path)
        self.adapter: ModelAdapter = family.load(spec.model.path, dtype=dtype_of(spec.model.dtype))
        self._has_lora = False
        known = family_of(spec.model.path)
        takes = known.takes_images if not known.holds_first_frame else int(spec.rollout.from_image)
        self._images = (_IMAGE, ImageOps.mirror(_IMAGE)) if takes else ()

    def load(self, state: dict[str, torch.Tensor], lora: Any) -> None:
        """Takes a published adapter."""
        if not self._has_lora:
            install_lora(self.adapter.experts, lora)
            self._has_lora = True
        load_adapter(self.adapter.experts, state)

    def draw(self, blobs: SyncBlobs, step: int, *, policy_version: int | None = None) -> TrainStepRequest:
        """The whole TrainStepRequest of a step, with made-up advantages that sum to 0 in each group of even size.

        For losses on pairs, neighbors are one: the first loses.
        """
        samples = [sample for part in self._parts() for sample in self._draw(blobs, step, part)]
        version = step if policy_version is None else policy_version
        request = TrainStepRequest(job_id=JOB, step=step)
        for number, sample in enumerate(samples):
            sample.policy_version = version
            sign, size = 1.0 if number % 2 else -1.0, 1 + sample.id.group / 2
            if self._spec.loss.needs_pairs:
                item = TrainSample(sample=sample, advantage=sign, reward=0.5, pair=sample.id.index // 2)
            else:
                without_kl = bool(self._spec.algorithm.of(KlGateSettings).kl_gate.rewards) and number % 3 > 0
                item = TrainSample(sample=sample, advantage=sign * size, reward=0.5, without_kl=without_kl)
            request.samples.append(item)
        return request

    def _parts(self) -> list[range]:
        rollout = self._spec.rollout
        size = max(1, rollout.batch_size // rollout.group_size)
        groups = range(rollout.prompts_per_step)
        return [groups[start : start + size] for start in range(0, len(groups), size)]

    def _draw(self, blobs: SyncBlobs, step: int, groups: Sequence[int]) -> list[Sample]:
        request = self._request(step, groups)
        sampler = Sampler(self.adapter)
        encoded = sampler.encode(request)
        drawn = [sampler.sample(request, encoded, rows, lambda: None) for rows in batches(request, 256)]
        return [sample for batch in drawn for sample in self._store(blobs, step, batch)]

    def _request(self, step: int, groups: Sequence[int]) -> GenerationRequest:
        rollout, seed = self._spec.rollout, self._spec.seed
        indices = tuple(range(rollout.group_size))
        return GenerationRequest(
            groups=tuple(
                PromptGroup(
                    group,
                    PROMPTS[group],
                    indices,
                    tuple(sample_seed(seed, step, group, index) for index in indices),
                    images=self._images[group % 2 :][:1],
                )
                for group in groups
            ),
            sampling=Sampling(
                rollout.size,
                rollout.num_inference_steps,
                rollout.guidance,
                rollout.negative_prompt,
                rollout.condition_pixels,
                shift=rollout.shift,
            ),
            noise=self._noise(step),
            record="steps" if self._spec.records_steps else "final",
        )

    def _noise(self, step: int) -> Noise:
        noise, seed = self._spec.rollout.noise, self._spec.seed
        if noise.eta == 0 and not self._spec.loss.from_steps:
            return Noise()
        window = self._spec.window
        return Noise(noise.type, noise.eta, window.noisy(seed, step), recorded=window.trained(seed, step))

    def _store(self, blobs: SyncBlobs, step: int, batch: GeneratedBatch) -> list[Sample]:
        def put(kind: str, prompts: Mapping[int, PromptEmbeds]) -> dict[int, BlobRef]:
            return {
                group: blobs.put(keys.blob(JOB, kind, step, group), EmbedsBlob.of_row(prompt).to_bytes())
                for group, prompt in prompts.items()
            }

        embeds, negatives = put("embeds", batch.embeds), put("negative", batch.negative)
        return [
            self._sample(blobs, step, sample, embeds[sample.group], negatives.get(sample.group))
            for sample in batch.samples
        ]

    def _sample(
        self, blobs: SyncBlobs, step: int, sample: GeneratedSample, embeds: BlobRef, negative: BlobRef | None
    ) -> Sample:
        record, size = sample.record, self._spec.rollout.size
        assert record is not None
        return Sample(
            id=SampleId(job_id=JOB, step=step, group=sample.group, index=sample.index),
            purpose=PURPOSE_TRAIN,
            seed=sample.seed,
            trajectory=blobs.put(keys.blob(JOB, "trajectory", step, sample.group, sample.index), record.to_bytes()),
            prompt_embeds=embeds,
            negative_embeds=negative,
            sde_steps=record.step_indices.tolist() if isinstance(record, Trajectory) else [],
            height=size.height,
            width=size.width,
            num_frames=size.num_frames,
        )
