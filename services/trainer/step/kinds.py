"""How a step's samples are checked, planned and read, by what they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from flowfleet.data.blobs import SyncBlobs
from flowfleet.job.spec import JobSpec
from flowfleet.models.settings import Size
from flowfleet.proto.common_pb2 import Sample
from flowfleet.proto.trainer_pb2 import TrainSample, TrainStepRequest
from services.trainer.step.batches import Key, MicroBatch, Pair, Update, plan_passes
from services.trainer.step.inputs import Batch, StepReader
from services.trainer.step.packing import plan_packed
from services.trainer.step.sequences import SequenceReader

Passes = tuple[tuple[Update, ...], ...]


class Reader(Protocol):
    """Reads a rank's share of the blobs."""

    def read(self, request: TrainStepRequest, updates: Iterable[Update], rank: int) -> None:
        """Into host memory; whatever is wrong names its sample."""

    def batch(self, micro: MicroBatch) -> Batch:
        """A micro-batch of those read, on the device."""

    def clear(self) -> None:
        """Frees the step's data."""


class StepKind(Protocol):
    """Part of a training step that depends on the kind of samples: which go together, their passes, their reader."""

    def problem(self, sample: Sample, first: Sample, spec: JobSpec) -> str | None:
        """Returns why a sample cannot be trained on together with the step's first; None when it can."""

    def plan(
        self, samples: Sequence[TrainSample], keys: Sequence[Key], pairs: Sequence[Pair], spec: JobSpec, place: Place
    ) -> Passes:
        """Returns the updates of each pass."""

    def reader(self, adapter: Any, spec: JobSpec, blobs: SyncBlobs, on_sample: Callable[[], None]) -> Reader:
        """Returns a reader of the job's samples."""


Place = tuple[int, int]
"""Training step, and number of ranks."""


class FlowKind:
    """See `StepKind`. Final latents alone are trained on, at new noise."""

    def problem(self, sample: Sample, first: Sample, spec: JobSpec) -> str | None:
        if spec.rollout.guidance.is_on and not sample.HasField("negative_embeds"):
            return "it carries no negative embeds, but the job samples with guidance"
        size = Size(sample.height, sample.width, sample.num_frames)
        if size != spec.rollout.size:
            return f"it has {_text(size)}, this job's have {_text(spec.rollout.size)}"
        return None

    def plan(
        self, samples: Sequence[TrainSample], keys: Sequence[Key], pairs: Sequence[Pair], spec: JobSpec, place: Place
    ) -> Passes:
        return plan_passes(keys, spec, *place, pairs=pairs)

    def reader(self, adapter: Any, spec: JobSpec, blobs: SyncBlobs, on_sample: Callable[[], None]) -> Reader:
        return StepReader(adapter, spec, blobs, on_sample)


class StepsKind(FlowKind):
    """Noisy steps are trained on."""

    def problem(self, sample: Sample, first: Sample, spec: JobSpec) -> str | None:
        """Rejects also samples whose noisy steps differ from the first's."""
        steps, num_steps = list(sample.sde_steps), spec.rollout.num_inference_steps
        if problem := super().problem(sample, first, spec):
            return problem
        if not steps or steps != list(first.sde_steps):
            return f"noise entered at steps {steps}, at {list(first.sde_steps)} in the first: all must share them"
        return None if steps[-1] < num_steps else f"noise entered at steps {steps} of {num_steps}"


class SequenceKind:
    """See `StepKind`. Written tokens are trained on, packed by their number."""

    def problem(self, sample: Sample, first: Sample, spec: JobSpec) -> str | None:
        most = spec.rollout.sequence.max_tokens
        if not 0 < sample.num_tokens <= most:
            return f"it has {sample.num_tokens} tokens, this job's have 1 to {most}"
        return None if sample.prompt_tokens else "it does not say how many tokens its prompt has"

    def plan(
        self, samples: Sequence[TrainSample], keys: Sequence[Key], pairs: Sequence[Pair], spec: JobSpec, place: Place
    ) -> Passes:
        sizes = [item.sample.prompt_tokens + item.sample.num_tokens - 1 for item in samples]
        return plan_packed(keys, sizes, spec, *place)

    def reader(self, adapter: Any, spec: JobSpec, blobs: SyncBlobs, on_sample: Callable[[], None]) -> Reader:
        return SequenceReader(adapter, spec, blobs, on_sample)


def step_kind(spec: JobSpec) -> StepKind:
    """Kind of the job's samples."""
    if spec.writes_tokens:
        return SequenceKind()
    return StepsKind() if spec.records_steps else FlowKind()


def _text(size: Size) -> str:
    frames = "" if size.num_frames == 1 else f" in {size.num_frames} frames"
    return f"{size.width}×{size.height} pixels{frames}"
