"""A step's samples on their way to tensors: the request checked, this rank's share of the blobs read and checked.

Everything here happens before any weight changes; whatever is wrong says which sample it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from flowfleet.blobs import SyncBlobs
from flowfleet.errors import FlowfleetError, InvalidRequest
from flowfleet.jobs import JobSpec
from flowfleet.models import ModelAdapter, PromptEmbeds, Schedule
from flowfleet.models.base import concat_embeds
from flowfleet.proto.common_pb2 import BlobRef, Sample, SampleId
from flowfleet.proto.trainer_pb2 import TrainSample, TrainStepRequest
from flowfleet.trajectories import EmbedsBlob, Trajectory
from services.trainer.batches import Key, MicroBatch, Update

_READERS = 4


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the device: B samples of W steps."""

    rows: tuple[int, ...]
    """Indices into the step's samples."""
    is_padding: bool
    latents: Tensor
    """(W, B, *latent) float32, before each step."""
    next_latents: Tensor
    """(W, B, *latent) float32, after each step."""
    rollout_log_probs: Tensor
    """(W, B) float32, as the rollout stored them."""
    advantages: Tensor
    """(B,) float32."""
    prompts: PromptEmbeds
    negative: PromptEmbeds | None


def check_request(request: TrainStepRequest, spec: JobSpec) -> list[Key]:
    """(group, index) of every sample. Raises InvalidRequest naming the sample that cannot be trained on."""
    if not request.samples:
        raise InvalidRequest(f"step {request.step} has no samples: skip it or ask for others")
    keys: list[Key] = []
    for item in request.samples:
        if problem := _problem(item, request, spec):
            raise InvalidRequest(f"sample {sample_name(item.sample.id)}: {problem}")
        keys.append((item.sample.id.group, item.sample.id.index))
    if len(set(keys)) != len(keys):
        raise InvalidRequest(f"step {request.step} has samples twice: send each (group, index) once")
    return keys


def sample_name(sample: SampleId) -> str:
    """As people read it: job/step/group/index."""
    return f"{sample.job_id}/{sample.step}/{sample.group}/{sample.index}"


class StepReader:
    """Reads the blobs of a rank's micro-batches into host memory; `batch` then puts one on the device."""

    def __init__(self, adapter: ModelAdapter, spec: JobSpec, blobs: SyncBlobs) -> None:
        rollout = spec.rollout
        self._adapter = adapter
        self._blobs = blobs
        self._guided = rollout.guidance_scale > 1
        self._shape = adapter.latent_shape(rollout.height, rollout.width)
        self.schedule: Schedule = adapter.schedule(rollout.num_inference_steps, rollout.height, rollout.width)
        self._samples: Sequence[TrainSample] = ()
        self._trajectories: dict[int, Trajectory] = {}
        self._embeds: dict[str, PromptEmbeds] = {}

    def read(self, request: TrainStepRequest, updates: Iterable[Update], rank: int) -> None:
        """Raises NotFound or DataLoss naming the first sample whose blob is gone or broken."""
        self._samples = request.samples
        rows = sorted({row for update in updates for batch in update.by_rank[rank] for row in batch.rows})
        with ThreadPoolExecutor(_READERS, "blobs") as pool:
            self._trajectories = dict(zip(rows, pool.map(self._trajectory, rows), strict=True))
            wanted = {ref.sha256: (row, ref) for row in reversed(rows) for ref in self._text_refs(row)}
            self._embeds = dict(zip(wanted, pool.map(self._text, wanted.values()), strict=True))
        widths = {embeds.embeds.shape[2] for embeds in self._embeds.values()}
        if len(widths) > 1:
            raise InvalidRequest(
                f"prompt embeds of this step are {sorted(widths)} wide: all rollouts need one text encoder"
            )

    def batch(self, micro: MicroBatch) -> Batch:
        """A micro-batch of those read."""
        device = self._adapter.device
        trajectories = [self._trajectories[row] for row in micro.rows]
        samples = [self._samples[row] for row in micro.rows]
        return Batch(
            rows=micro.rows,
            is_padding=micro.is_padding,
            latents=torch.stack([trajectory.latents for trajectory in trajectories], 1).to(device),
            next_latents=torch.stack([trajectory.next_latents for trajectory in trajectories], 1).to(device),
            rollout_log_probs=torch.stack([trajectory.log_probs for trajectory in trajectories], 1).to(device),
            advantages=torch.tensor([item.advantage for item in samples], dtype=torch.float32, device=device),
            prompts=self._prompts([item.sample.prompt_embeds for item in samples]),
            negative=self._prompts([samples[0].sample.negative_embeds]) if self._guided else None,
        )

    def clear(self) -> None:
        """Frees the step's data."""
        self._samples, self._trajectories, self._embeds = (), {}, {}

    def _prompts(self, refs: Sequence[BlobRef]) -> PromptEmbeds:
        """One row a reference, padded to the widest, as the rollout padded them to the widest of its request."""
        names = list(dict.fromkeys(ref.sha256 for ref in refs))
        embeds = concat_embeds([self._embeds[name] for name in names])
        return embeds.select([names.index(ref.sha256) for ref in refs]).to(self._adapter.device)

    def _trajectory(self, row: int) -> Trajectory:
        sample = self._samples[row].sample
        with _naming(sample):
            trajectory = Trajectory.from_bytes(self._blobs.get(sample.trajectory))
            self._check(trajectory, list(sample.sde_steps))
        return trajectory

    def _check(self, trajectory: Trajectory, steps: list[int]) -> None:
        if trajectory.step_indices.tolist() != steps:
            raise InvalidRequest(f"its trajectory holds steps {trajectory.step_indices.tolist()}, it names {steps}")
        if trajectory.latents.shape[1:] != self._shape:
            shape = tuple(trajectory.latents.shape[1:])
            raise InvalidRequest(f"its latents have shape {shape}, this job's have {self._shape}")
        sigmas, sigmas_next = self.schedule.sigmas[steps], self.schedule.sigmas[[step + 1 for step in steps]]
        if not (torch.equal(trajectory.sigmas, sigmas) and torch.equal(trajectory.sigmas_next, sigmas_next)):
            raise InvalidRequest(
                "it was sampled on another schedule than the trainer's: rollout and trainer need the same model folder "
                "and the same version of diffusers"
            )

    def _text_refs(self, row: int) -> list[BlobRef]:
        sample = self._samples[row].sample
        return [sample.prompt_embeds, sample.negative_embeds] if self._guided else [sample.prompt_embeds]

    def _text(self, wanted: tuple[int, BlobRef]) -> PromptEmbeds:
        row, ref = wanted
        with _naming(self._samples[row].sample):
            blob = EmbedsBlob.from_bytes(self._blobs.get(ref))
        return PromptEmbeds(blob.embeds[None], blob.mask[None])


@contextmanager
def _naming(sample: Sample) -> Iterator[None]:
    """Puts the sample's name before the message of an error."""
    name = sample_name(sample.id)
    try:
        yield
    except FlowfleetError as error:
        raise type(error)(f"sample {name}: {error}") from None
    except ValueError as error:
        raise InvalidRequest(f"sample {name}: {error}") from None


def _problem(item: TrainSample, request: TrainStepRequest, spec: JobSpec) -> str | None:
    """Why a sample cannot be trained on; None when it can."""
    sample, rollout = item.sample, spec.rollout
    if sample.id.job_id != request.job_id:
        return f"it belongs to another job than {request.job_id}"
    if not math.isfinite(item.advantage):
        return f"its advantage is {item.advantage}: drop it"
    if not sample.HasField("trajectory") or not sample.HasField("prompt_embeds"):
        return "it carries no trajectory and prompt embeds: only samples for training do"
    if rollout.guidance_scale > 1 and not sample.HasField("negative_embeds"):
        return "it carries no negative embeds, but the job samples with guidance"
    if (sample.height, sample.width) != (rollout.height, rollout.width):
        return f"it is {sample.width}×{sample.height} pixels, this job's are {rollout.width}×{rollout.height}"
    first = request.samples[0].sample.sde_steps
    if not sample.sde_steps or list(sample.sde_steps) != list(first):
        return f"noise entered at steps {list(sample.sde_steps)}, at {list(first)} in the first: all must share them"
    if sample.sde_steps[-1] >= rollout.num_inference_steps:
        return f"noise entered at steps {list(sample.sde_steps)} of {rollout.num_inference_steps}"
    return None
