"""How a step's samples are checked, planned and read, by what they keep: noisy steps, final latents or tokens."""

from collections.abc import Callable, Sequence
from typing import Any

from flowfleet.data.blobs import SyncBlobs
from flowfleet.job.spec import JobSpec
from flowfleet.models.settings import Size
from flowfleet.proto.common_pb2 import Sample
from flowfleet.proto.trainer_pb2 import TrainSample
from services.trainer.step.batches import Key, Pair, Update, plan_passes
from services.trainer.step.inputs import Reader, StepReader
from services.trainer.step.packing import plan_packed
from services.trainer.step.sequences import SequenceReader

Place = tuple[int, int]
"""Training step, and number of ranks."""


def problem_of(sample: Sample, first: Sample, spec: JobSpec) -> str | None:
    """Returns why a sample cannot be trained on together with the step's first; None when it can."""
    return _sequence_problem(sample, spec) if spec.writes_tokens else _flow_problem(sample, first, spec)


def plan(
    samples: Sequence[TrainSample], keys: Sequence[Key], pairs: Sequence[Pair], spec: JobSpec, place: Place
) -> tuple[tuple[Update, ...], ...]:
    """Returns the updates of each pass. Sequences are packed by their number of tokens."""
    if not spec.writes_tokens:
        return plan_passes(keys, spec, *place, pairs=pairs)
    sizes = [item.sample.prompt_tokens + item.sample.num_tokens - 1 for item in samples]
    return plan_packed(keys, sizes, spec, *place)


def reader_of(adapter: Any, spec: JobSpec, blobs: SyncBlobs, on_sample: Callable[[], None]) -> Reader:
    """Returns a reader of the job's samples."""
    return (SequenceReader if spec.writes_tokens else StepReader)(adapter, spec, blobs, on_sample)


def _flow_problem(sample: Sample, first: Sample, spec: JobSpec) -> str | None:
    """Rejects also samples whose noisy steps differ from the first's, where these are trained on."""
    if spec.rollout.guidance.is_on and not sample.HasField("negative_embeds"):
        return "it carries no negative embeds, but the job samples with guidance"
    size = Size(sample.height, sample.width, sample.num_frames)
    if size != spec.rollout.size.whole and not spec.data.size_column:
        return f"it has {_text(size)}, this job's have {_text(spec.rollout.size)}"
    if not spec.records_steps:
        return None
    steps, num_steps = list(sample.sde_steps), spec.rollout.num_inference_steps
    if not steps or steps != list(first.sde_steps):
        return f"noise entered at steps {steps}, at {list(first.sde_steps)} in the first: all must share them"
    return None if steps[-1] < num_steps else f"noise entered at steps {steps} of {num_steps}"


def _sequence_problem(sample: Sample, spec: JobSpec) -> str | None:
    most = spec.rollout.sequence.max_tokens
    if not 0 < sample.num_tokens <= most:
        return f"it has {sample.num_tokens} tokens, this job's have 1 to {most}"
    return None if sample.prompt_tokens else "it does not say how many tokens its prompt has"


def _text(size: Size) -> str:
    frames = "" if size.num_frames == 1 else f" in {size.num_frames} frames"
    return f"{size.width}×{size.height} pixels{frames}"
