"""Record of the steps that a trainer applied, kept in memory and in every checkpoint as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowfleet.data import lineage
from flowfleet.errors import Conflict
from flowfleet.proto import trainer_pb2

MAX_RESULTS = 1024
"""Results kept; a controller asks for the newest ones only."""


@dataclass
class Record:
    version: int = 0
    """Version of the weights; `applied` in checkpoints."""
    skipped_updates: int = 0
    """Updates whose gradient was not finite, since the start of the job."""
    samples: int = 0
    """Samples trained on."""
    results: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics by step, the newest `MAX_RESULTS`."""
    history: dict[int, str] = field(default_factory=dict)
    """Version → its lineage, of as many (flowfleet/data/lineage.py); none in checkpoints from before it was kept."""

    def add(self, request: trainer_pb2.TrainStepRequest, metrics: Mapping[str, float]) -> None:
        """A step was applied."""
        step = request.step
        assert step == self.version, f"step {step} was applied to version {self.version}"
        self.version += 1
        self.results[step] = dict(metrics)
        self.results.pop(step - MAX_RESULTS, None)
        lineage.extend(self.history, request)
        self.history.pop(step - MAX_RESULTS, None)

    def result(self, step: int) -> dict[str, float]:
        """Result of a step below `version`. Raises Conflict if it is too old to be kept."""
        if step not in self.results:
            raise Conflict(
                f"step {step} was applied long ago and its result was deleted; the next step is {self.version}"
            )
        return self.results[step]

    def check_replay(self, request: trainer_pb2.TrainStepRequest) -> None:
        """Raises Conflict where a step below `version` was applied from another request: its result is of another
        history of the job."""
        repeated = lineage.follow(self.history, request)
        if repeated and self.history.get(request.step + 1, repeated) != repeated:
            raise Conflict(
                f"step {request.step} was applied from another request: start another trainer, which loads a "
                "checkpoint that goes with the ledger"
            )

    def to_json(self) -> dict[str, Any]:
        return {
            "applied": self.version,
            "skipped_updates": self.skipped_updates,
            "samples": self.samples,
            "results": {str(step): metrics for step, metrics in self.results.items()},
            "history": {str(version): lineage for version, lineage in self.history.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Raises KeyError, TypeError or ValueError when it is not a record."""
        results = {int(step): {name: float(value) for name, value in m.items()} for step, m in data["results"].items()}
        counts = {name: int(data[name]) for name in ("skipped_updates", "samples")}
        history = {int(version): str(lineage) for version, lineage in data.get("history", {}).items()}
        return cls(version=int(data["applied"]), results=results, history=history, **counts)
