"""Decides `trainer.mesh.sequence = "auto"` and `trainer.offload = "auto"`, where a trainer starts."""

from collections.abc import Sequence
from typing import Final, Literal

from flowfleet import hub
from flowfleet.job.spec import JobSpec
from flowfleet.planning.advice import advise
from flowfleet.planning.facts import gather
from flowfleet.planning.memory import GIB, RESERVE, trainer_memory
from flowfleet.planning.storage import TEXT_TOKENS

LEVELS: Final[tuple[Literal["none", "optimizer", "activations"], ...]] = ("none", "optimizer", "activations")


def settled(spec: JobSpec, device_bytes: float | None, degrees: Sequence[int] = (1,)) -> JobSpec:
    """The job with the first of what it leaves open that is predicted to fit devices of this memory: few ranks a
    sample before many, and for each number of them little in host memory before much. Without a number of bytes, the
    first.

    Args:
        spec: of the job.
        device_bytes: memory of a rank's device; None where it is not known.
        degrees: numbers of ranks that can share a sample, the smallest first.

    Raises ValueError, with the smallest changes that would fit, where none does.
    """
    part = spec.trainer
    shares, moves = part.mesh.sequence == "auto", part.offload == "auto"
    if not (shares or moves):
        return spec
    has_inputs = part.gradient_checkpointing == "full"
    levels = (LEVELS if has_inputs else LEVELS[:-1]) if moves else (part.offload,)
    jobs = [_with(spec, degree, level) for degree in (degrees if shares else (part.mesh.degree,)) for level in levels]
    if device_bytes is None or spec.writes_tokens:
        return jobs[0]
    model = spec.model.model_copy(update={"path": str(hub.configurations(spec.model.path))})
    facts = gather(spec.model_copy(update={"model": model}), TEXT_TOKENS, compiled=part.compile)
    for job in jobs:
        if trainer_memory(job, facts, device_bytes).peak <= device_bytes - RESERVE:
            return job
    advice = "; ".join(line.removeprefix("trainer: ") for line in advise(jobs[-1], facts, device_bytes - RESERVE))
    raise ValueError(f"the job is predicted not to fit devices of {device_bytes / GIB:.1f} GiB: {advice}")


def _with(spec: JobSpec, degree: int, level: str) -> JobSpec:
    mesh = spec.trainer.mesh.model_copy(update={"sequence": degree})
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"offload": level, "mesh": mesh})})
