"""State of a running job, which events are folded into (state_machine.py) and the ledger keeps."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel

from flowfleet.rewards.changes import RewardSet
from services.controller.job.machine.batch import Batch


class Status(StrEnum):
    """Status of a running job; the store adds `queued`."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = (Status.SUCCEEDED, Status.FAILED, Status.CANCELLED)


class Revision(BaseModel):
    """The rewards and shadows of a job from a step on, until another one's first step."""

    number: int
    from_step: int
    set: RewardSet


LEDGER_FORMAT = 1
"""Format of snapshots and events, raised when an older controller must not fold them; 1 also where none is stored."""


class State(BaseModel):
    """State of a running job. A restart rediscovers the volatile part."""

    format: int = LEDGER_FORMAT
    status: Status = Status.STARTING
    reason: str = ""
    version: int = 0
    published: int = -1
    evaluated: bool = False
    """True if that version's evaluated weights are published; else those that sample."""
    checkpointed: int = 0
    validated: int = -1
    exported: bool = False
    held_out_reward: float | None = None
    batches: dict[int, Batch] = {}
    samples_trained: int = 0
    samples_dropped: dict[str, int] = {}
    drop_causes: dict[str, str] = {}
    """Reason → the first cause."""
    duplicates: int = 0
    trained_at: float | None = None
    revisions: list[Revision] = []
    """Revisions of the rewards that an open or a later step has, ascending by number and step. Steps before the first
    of them have the rewards as submitted."""
    history: dict[int, str] = {}
    """Version → lineage: of this version and of those that a checkpoint may be of (flowfleet/data/lineage.py)."""
    weights: dict[int, set[str]] = {}
    """Version → digests that were published of it, of versions that an open step may train on."""

    steps: int | None = None
    """Training steps of the whole job since its user changed them; none: as submitted."""
    steps_asked: int | None = None
    """Steps that the user requested then."""

    trainer_version: int | None = None  # volatile: of the live trainer's weights; none without a trainer
    behind: bool = False  # volatile: a live replica misses the published version

    def without_volatile(self) -> State:
        return self.model_copy(update={"trainer_version": None, "behind": False})
