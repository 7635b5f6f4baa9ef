"""A step's samples on their way to tensors: this rank's share of the blobs, read and checked.

Everything here happens before any weight changes; whatever is wrong says which sample it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowfleet.algorithms.parts import LatentParts, joined
from flowfleet.data.blobs import SyncBlobs
from flowfleet.data.samples import sample_name
from flowfleet.data.trajectories import EmbedsBlob, FinalLatents, Trajectory
from flowfleet.errors import FlowfleetError, InvalidRequest
from flowfleet.job.spec import JobSpec
from flowfleet.models.base import ModelAdapter
from flowfleet.models.embeds import PromptEmbeds, concat_embeds
from flowfleet.models.settings import Size
from flowfleet.proto.common_pb2 import BlobRef, Sample
from flowfleet.proto.trainer_pb2 import TrainSample, TrainStepRequest
from services.trainer.model.sizes import Sized, Sizes
from services.trainer.step.batches import MicroBatch, Update

READERS = 8
"""Threads that read blobs."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch of B samples on the device."""

    rows: tuple[int, ...]
    """Indices into the step's samples."""
    is_padding: bool
    advantages: Tensor
    """(B,) float32."""


@dataclass(frozen=True, kw_only=True)
class FlowBatch(Batch):
    """Inputs that every forward of a flow takes."""

    size: Size
    """Size of all samples."""
    ties: Tensor
    """(B,) float32: 1 where the KL to the reference counts, else 0."""
    teachers: tuple[str, ...] = ()
    """Names of the B rows' teachers; empty ones for losses without."""
    prompts: PromptEmbeds
    """B rows."""
    negative: PromptEmbeds | None
    """1 or B rows; None without guidance."""


@dataclass(frozen=True, kw_only=True)
class StepsBatch(FlowBatch):
    """Inputs with the W noisy steps of each sample, for policy losses."""

    latents: Tensor
    """(W, B, *latent) float32, before each step."""
    next_latents: Tensor
    """(W, B, *latent) float32, after each step."""
    rollout_log_probs: Tensor
    """(W, B) float64, as the rollout stored them."""


@dataclass(frozen=True, kw_only=True)
class FinalBatch(FlowBatch):
    """Inputs with each sample's final latents, for matching losses."""

    clean: Tensor
    """(B, *latent) float32."""
    places: tuple[tuple[int, int], ...]
    """Per row its group, and by kind of loss its index, its pair's number or 0. With the step they seed its noise."""


class Reader(ABC):
    """Reads the blobs of a rank's micro-batches into host memory; `batch` then puts one on the device."""

    def __init__(
        self, adapter: Any, spec: JobSpec, blobs: SyncBlobs, on_sample: Callable[[], None] = lambda: None
    ) -> None:
        """`on_sample` is called after each sample that was read."""
        self._adapter, self._spec, self._blobs, self._on_sample = adapter, spec, blobs, on_sample
        self._samples: Sequence[TrainSample] = ()
        self._records: dict[int, Any] = {}
        self._prompts: dict[str, Any] = {}
        """Digest of a blob to what it holds."""

    def read(self, request: TrainStepRequest, updates: Iterable[Update], rank: int) -> None:
        """Raises NotFound or DataLoss naming the first sample whose blob is gone or broken."""
        self._samples, self._records = request.samples, {}
        rows = sorted({row for update in updates for batch in update.by_rank[rank] for row in batch.rows})
        with ThreadPoolExecutor(READERS, "blobs") as pool:
            wanted = {ref.sha256: (row, ref) for row in reversed(rows) for ref in self._prompt_refs(row)}
            self._prompts = dict(zip(wanted, pool.map(self._prompt, wanted.values()), strict=True))
            for row, record in zip(rows, pool.map(self._record, rows), strict=True):
                self._records[row] = record
                self._on_sample()

    @abstractmethod
    def batch(self, micro: MicroBatch) -> Batch:
        """A micro-batch of those read."""

    def clear(self) -> None:
        """Frees the step's data."""
        self._samples, self._records, self._prompts = (), {}, {}

    def _prompt_refs(self, row: int) -> list[BlobRef]:
        return [self._samples[row].sample.prompt_embeds]

    @abstractmethod
    def _prompt(self, wanted: tuple[int, BlobRef]) -> Any:
        """Reads a prompt, of the sample of that row."""

    @abstractmethod
    def _record(self, row: int) -> Any:
        """Reads what a sample keeps."""


class StepReader(Reader):
    """Reader of the samples of flows."""

    def __init__(self, adapter: ModelAdapter, *args: Any) -> None:
        super().__init__(adapter, *args)
        self._sizes = Sizes(adapter, self._spec)

    def read(self, request: TrainStepRequest, updates: Iterable[Update], rank: int) -> None:
        super().read(request, updates, rank)
        widths = {embeds.embeds.shape[2] for embeds in self._prompts.values()}
        if len(widths) > 1:
            raise InvalidRequest(
                f"prompt embeds of this step are {sorted(widths)} wide: all rollouts need one text encoder"
            )

    def batch(self, micro: MicroBatch) -> StepsBatch | FinalBatch:
        device = self._adapter.device
        items = [self._samples[row] for row in micro.rows]
        common: dict[str, Any] = {
            "rows": micro.rows,
            "is_padding": micro.is_padding,
            "advantages": torch.tensor([item.advantage for item in items], dtype=torch.float32, device=device),
            "size": self._size(items[0].sample),
            "ties": torch.tensor([float(not item.without_kl) for item in items], device=device),
            "teachers": tuple(item.teacher for item in items),
            "prompts": self._embeds([item.sample.prompt_embeds for item in items]),
            "negative": self._negative(items),
        }
        records, parts = [self._records[row] for row in micro.rows], self._sizes.of(common["size"]).parts
        steps = [record for record in records if isinstance(record, Trajectory)]
        if steps:
            return StepsBatch(
                **common,
                latents=torch.stack([record.latents for record in steps], 1).to(device),
                next_latents=torch.stack([record.next_latents for record in steps], 1).to(device),
                rollout_log_probs=torch.stack([self._log_probs(record, parts) for record in steps], 1).to(device),
            )
        places = tuple(self._place(item) for item in items)
        return FinalBatch(**common, clean=torch.stack([record.latents for record in records]).to(device), places=places)

    def _log_probs(self, record: Trajectory, parts: LatentParts | None) -> Tensor:
        return joined(record.log_probs, parts) if parts else record.log_probs

    def _size(self, sample: Sample) -> Size:
        return self._spec.rollout.size_of((sample.width, sample.height))

    def _place(self, item: TrainSample) -> tuple[int, int]:
        loss, sample_id = self._spec.loss, item.sample.id
        return sample_id.group, item.pair if loss.needs_pairs else 0 if loss.shares_noise else sample_id.index

    def _negative(self, items: Sequence[TrainSample]) -> PromptEmbeds | None:
        """Returns a single row where all samples share the negative prompt, so that it does not depend on the batch."""
        if not self._spec.rollout.guidance.is_on:
            return None
        refs = [item.sample.negative_embeds for item in items]
        return self._embeds(refs[:1] if len({ref.sha256 for ref in refs}) == 1 else refs)

    def _embeds(self, refs: Sequence[BlobRef]) -> PromptEmbeds:
        """Returns one row per reference, padded to the widest. The rollout padded them to the widest of its request."""
        names = list(dict.fromkeys(ref.sha256 for ref in refs))
        embeds = concat_embeds([self._prompts[name] for name in names])
        return embeds.select([names.index(ref.sha256) for ref in refs]).to(self._adapter.device)

    def _record(self, row: int) -> Trajectory | FinalLatents:
        sample = self._samples[row].sample
        with naming(sample):
            data, sized = self._blobs.get(sample.trajectory), self._sizes.of(self._size(sample))
            if not self._spec.records_steps:
                final = FinalLatents.from_bytes(data)
                _check_shape(final.latents.shape, sized)
                return final
            return _checked_steps(Trajectory.from_bytes(data), list(sample.sde_steps), sized)

    def _prompt_refs(self, row: int) -> list[BlobRef]:
        sample = self._samples[row].sample
        guided = self._spec.rollout.guidance.is_on
        return [sample.prompt_embeds, sample.negative_embeds] if guided else [sample.prompt_embeds]

    def _prompt(self, wanted: tuple[int, BlobRef]) -> PromptEmbeds:
        row, ref = wanted
        with naming(self._samples[row].sample):
            return EmbedsBlob.from_bytes(self._blobs.get(ref)).row()


@contextmanager
def naming(sample: Sample) -> Iterator[None]:
    """Puts the sample's name before the message of an error."""
    name = sample_name(sample.id)
    try:
        yield
    except FlowfleetError as error:
        raise type(error)(f"sample {name}: {error}") from None
    except ValueError as error:
        raise InvalidRequest(f"sample {name}: {error}") from None


def _checked_steps(trajectory: Trajectory, steps: list[int], sized: Sized) -> Trajectory:
    if trajectory.step_indices.tolist() != steps:
        raise InvalidRequest(f"its trajectory holds steps {trajectory.step_indices.tolist()}, expected {steps}")
    _check_shape(trajectory.latents.shape[1:], sized)
    num_parts = len(sized.parts.lengths) if sized.parts else 1
    if trajectory.log_probs.shape[1:].numel() != num_parts:
        raise InvalidRequest(f"it has log-probs {tuple(trajectory.log_probs.shape)}, but {num_parts} parts")
    sigmas, sigmas_next = sized.schedule.sigmas[steps], sized.schedule.sigmas[[step + 1 for step in steps]]
    if not (torch.equal(trajectory.sigmas, sigmas) and torch.equal(trajectory.sigmas_next, sigmas_next)):
        raise InvalidRequest(
            "it was sampled on another schedule than the trainer's: rollout and trainer need the same model folder "
            "and the same version of diffusers"
        )
    return trajectory


def _check_shape(shape: Sequence[int], sized: Sized) -> None:
    if tuple(shape) != sized.shape:
        raise InvalidRequest(f"its latents have shape {tuple(shape)}, this job's have {sized.shape}")
