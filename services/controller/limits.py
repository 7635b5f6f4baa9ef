"""How much one job, and all jobs together, may ask of the fleet and of this controller. Checked at submit. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from flowfleet.errors import Full
from flowfleet.job.spec import JobSpec
from services.controller.store.records import JobRecord


class Limits(BaseModel):
    """The operator's limits; `--limit NAME=VALUE` sets one."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    samples_per_step: int = Field(default=65_536, ge=1)
    """Most samples of one training step."""
    open_samples: int = Field(default=262_144, ge=1)
    """Most samples that the running jobs of all pools may have open at once."""
    ranks: int = Field(default=4096, ge=1)
    """Most ranks that the trainers of all pools may have together. A trainer is started whether or not its pool has a
    replica."""

    upload_bytes: int = Field(default=256 * 2**20, ge=0)
    """Most bytes of an uploaded prompt file. 0: no uploads."""
    uploads_bytes: int = Field(default=16 * 2**30, ge=0)
    """Most bytes of all uploads together."""
    data_bytes: int = Field(default=16 * 2**30, ge=0)
    """Most bytes of prompts and metadata that the running jobs of all pools may keep open in the state directory."""

    def problem(self, spec: JobSpec) -> str:
        """Says what a job must change to be admitted, whatever else runs; empty for one that may be."""
        rollout, asked, opened = spec.rollout, spec.samples_per_step, open_samples(spec)
        if asked > self.samples_per_step:
            return (
                f"rollout.prompts_per_step x rollout.group_size = {rollout.prompts_per_step} x {rollout.group_size} = "
                f"{asked} samples a step, and this controller admits {self.samples_per_step}: lower one of them, or "
                f"have the operator raise --limit samples_per_step"
            )
        if opened > self.open_samples:
            return (
                f"schedule.max_staleness = {spec.schedule.max_staleness} keeps {1 + spec.schedule.max_staleness} steps "
                f"of {asked} samples open, {opened} in all, and this controller admits {self.open_samples}: lower it, "
                f"or have the operator raise --limit open_samples"
            )
        if spec.trainer.world_size > self.ranks:
            return (
                f"trainer.world_size = {spec.trainer.world_size}: this controller admits {self.ranks} ranks: lower it, "
                "or have the operator raise --limit ranks"
            )
        return ""

    def check_room(
        self, spec: JobSpec, others: Iterable[JobRecord], data_bytes: int = 0, *, side_by_side: bool = False
    ) -> None:
        """Raises Full where the job and the others would have too many samples open, too many ranks, or too large data,
        together. `side_by_side`: the others run; else the largest of each pool counts, since a submitted job may wait
        for those of its pool."""
        own = "" if side_by_side else spec.rollout.pool
        data, samples, ranks = {own: data_bytes}, {own: open_samples(spec)}, {own: spec.trainer.world_size}
        for record in others:
            if record.is_unreadable:
                continue
            try:
                asked = _open_samples(record.spec["rollout"], record.spec["schedule"])
                world_size = int(record.spec["trainer"]["world_size"])
            except (KeyError, TypeError, ValueError):  # of another release, which no scheduler has looked at yet
                continue
            key = record.id if side_by_side else record.pool
            samples[key] = max(samples.get(key, 0), asked)
            ranks[key] = max(ranks.get(key, 0), world_size)
            data[key] = max(data.get(key, 0), record.data_bytes)
        if (total := sum(samples.values())) > self.open_samples:
            raise Full(
                f"the fleet's jobs would have {total} samples open at once, {open_samples(spec)} of them this job's, "
                f"and this controller admits {self.open_samples}: wait for another job's end, lower "
                "rollout.prompts_per_step or schedule.max_staleness, or have the operator raise --limit open_samples"
            )
        if (total := sum(data.values())) > self.data_bytes:
            raise Full(
                f"the prompts of the fleet's jobs would take {total} bytes, {data_bytes} of them this job's, and this "
                f"controller admits {self.data_bytes}: wait for another job's end, give fewer prompts or columns, or "
                "have the operator raise --limit data_bytes"
            )
        if (total := sum(ranks.values())) > self.ranks:
            raise Full(
                f"the fleet's trainers would have {total} ranks, {spec.trainer.world_size} of them this job's, and "
                f"this controller admits {self.ranks}: wait for another job's end, name a pool that has a job already, "
                "or have the operator raise --limit ranks"
            )


def open_samples(spec: JobSpec) -> int:
    """Samples that a job may have open at once."""
    return _open_samples(spec.rollout.model_dump(), spec.schedule.model_dump())


def _open_samples(rollout: Mapping[str, Any], schedule: Mapping[str, Any]) -> int:
    return int(rollout["prompts_per_step"] * rollout["group_size"] * (1 + schedule["max_staleness"]))
