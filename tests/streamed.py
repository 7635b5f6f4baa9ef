"""Samples of a job's stream, for tests that call Generate: of training samples it answers the ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowfleet.proto.common_pb2 import Sample


def streamed(told: Sequence[Sample], entries: Any) -> list[Sample]:
    """The samples that a call told, each as the newest entry of the stream has it. `entries` come from XRANGE."""
    stored = [Sample.FromString(fields[b"sample"]) for _, fields in entries]
    whole = {sample.id.SerializeToString(): sample for sample in stored}
    return [whole.get(sample.id.SerializeToString(), sample) for sample in told]
