"""Decides `trainer.offload = "auto"`, where a trainer starts."""

from typing import Final, Literal

from flowfleet import hub
from flowfleet.job.spec import JobSpec
from flowfleet.planning.advice import advise
from flowfleet.planning.facts import gather
from flowfleet.planning.memory import GIB, RESERVE, trainer_memory
from flowfleet.planning.storage import TEXT_TOKENS

LEVELS: Final[tuple[Literal["none", "optimizer", "activations"], ...]] = ("none", "optimizer", "activations")


def with_offload(spec: JobSpec, device_bytes: float | None) -> JobSpec:
    """The job with the first level that is predicted to fit devices of this memory; none where that is not known.

    Raises ValueError, with the smallest changes that would fit, where none does.
    """
    if spec.trainer.offload != "auto":
        return spec
    if device_bytes is None or spec.writes_tokens:
        return _at(spec, "none")
    model = spec.model.model_copy(update={"path": str(hub.configurations(spec.model.path))})
    facts = gather(spec.model_copy(update={"model": model}), TEXT_TOKENS, compiled=spec.trainer.compile)
    has_inputs = spec.trainer.gradient_checkpointing == "full"
    levels = [_at(spec, level) for level in (LEVELS if has_inputs else LEVELS[:-1])]
    for job in levels:
        if trainer_memory(job, facts, device_bytes).peak <= device_bytes - RESERVE:
            return job
    advice = "; ".join(line.removeprefix("trainer: ") for line in advise(levels[-1], facts, device_bytes - RESERVE))
    raise ValueError(f"the job is predicted not to fit devices of {device_bytes / GIB:.1f} GiB: {advice}")


def _at(spec: JobSpec, level: str) -> JobSpec:
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"offload": level})})
