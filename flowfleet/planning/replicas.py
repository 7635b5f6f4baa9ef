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
    if part.world_size == 1 or part.sharding == "replicate" or part.samples != "no":
        return True
    if spec.model.base == "fp8" or part.offload != "none":
        return True
    fits = device_bytes is None or base_bytes <= MOST_OF_DEVICE * device_bytes
    return part.sharding == "auto" and fits


ROOM_FOR_SAMPLES = 0.25
"""Share of a device's memory that must be free next to all weights, else the text encoder lies in host memory."""
STREAMED = 0.2
"""Share of such a text encoder that is on the device at once, at most."""


def keeps_encoder(free_bytes: float, weight_bytes: float, device_bytes: float) -> bool:
    """Returns True if a replica's text encoder stays on its device.

    Args:
        free_bytes: of the device, before the weights are there.
        weight_bytes: of text encoder and transformers that are yet to come.
        device_bytes: of the whole device.
    """
    return free_bytes - weight_bytes >= ROOM_FOR_SAMPLES * device_bytes
