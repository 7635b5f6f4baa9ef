"""Which trainer ranks hold a whole model each, and which share one (`trainer.sharding`). Free of torch."""

from __future__ import annotations

from flowfleet.job.spec import JobSpec

MOST_OF_DEVICE = 0.5
"""Share of a device's memory that a whole frozen base may take under `auto`; the rest is for activations."""


def replicates(spec: JobSpec, base_bytes: float, device_bytes: float | None) -> bool:
    """Returns True if every rank holds all of a model. Only a job that trains an adapter can; there a rank that is
    alone or samples always does.

    Args:
        base_bytes: of the frozen base, in the dtype that it is held in.
        device_bytes: memory of each rank's device; None where it is not known, as on CPUs.
    """
    part = spec.trainer
    if part.mode == "full":
        return False
    if part.world_size == 1 or part.sharding == "replicate" or part.samples != "no" or spec.model.base == "fp8":
        return True
    fits = device_bytes is None or base_bytes <= MOST_OF_DEVICE * device_bytes
    return part.sharding == "auto" and fits
