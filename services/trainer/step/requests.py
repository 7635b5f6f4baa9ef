"""Checks of requests before any blob is read. Each error names the sample or the field that is wrong."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

from flowfleet.data.samples import sample_name
from flowfleet.errors import InvalidRequest
from flowfleet.job.spec import JobSpec
from flowfleet.process.service import STATE_DIR
from flowfleet.proto.trainer_pb2 import TrainSample, TrainStepRequest
from flowfleet.redis.keys import check_job_id
from services.trainer.step.batches import Key, Pair
from services.trainer.step.kinds import problem_of


def check_directory(directory: str, job_id: str) -> None:
    """Raises InvalidRequest unless a directory to write to is absolute and, where `FLOWFLEET_STATE_DIR` is set, one of
    the job's own below it, links resolved."""
    path, root = Path(directory), os.environ.get(STATE_DIR)
    if not job_id or not path.is_absolute() or ".." in path.parts or "\0" in directory:
        raise InvalidRequest(f"directory {directory[:200]!r} of job {job_id[:64]!r}: give an absolute one without ..")
    if root and not path.resolve().is_relative_to(jobs := Path(root).resolve() / "jobs" / check_job_id(job_id)):
        raise InvalidRequest(f"directory {directory[:200]!r}: give one below {jobs}")


def check_request(request: TrainStepRequest, spec: JobSpec) -> list[Key]:
    """(group, index) of every sample; none of a step that has nothing to learn from. Raises InvalidRequest naming the
    sample that cannot be trained on."""
    keys: list[Key] = []
    for item in request.samples:
        if problem := _problem(item, request, spec):
            raise InvalidRequest(f"sample {sample_name(item.sample.id)}: {problem}")
        keys.append((item.sample.id.group, item.sample.id.index))
    if spec.trains_on_gradients and (missing := {group for group, _ in keys} - {one.group for one in request.prompts}):
        raise InvalidRequest(f"step {request.step} has no prompt for group {min(missing)}: rewards are asked with it")
    if len(set(keys)) != len(keys):
        raise InvalidRequest(f"step {request.step} has samples twice: send each (group, index) once")
    return keys


def pairs_of(request: TrainStepRequest, spec: JobSpec) -> list[Pair]:
    """Winner and loser of each pair, for losses that need pairs; for others none.

    Two samples of a group with one pair number are a pair; the winner's advantage is above 0, the loser's below. Raises
    InvalidRequest naming a sample that is in no such pair.
    """
    if not spec.loss.needs_pairs:
        return []
    members: dict[tuple[int, int], list[int]] = {}
    for row, item in enumerate(request.samples):
        members.setdefault((item.sample.id.group, item.pair), []).append(row)
    return [_pair(rows, request.samples) for _, rows in sorted(members.items())]


def _pair(rows: list[int], samples: Sequence[TrainSample]) -> Pair:
    winners = [row for row in rows if samples[row].advantage > 0]
    losers = [row for row in rows if samples[row].advantage < 0]
    if (len(winners), len(losers), len(rows)) != (1, 1, 2):
        first = samples[rows[0]]
        raise InvalidRequest(
            f"sample {sample_name(first.sample.id)}: its pair {first.pair} has {len(winners)} winners and "
            f"{len(losers)} losers among {len(rows)} samples; a pair is two samples of a group, one with an advantage "
            "above 0 and one below"
        )
    return winners[0], losers[0]


def _problem(item: TrainSample, request: TrainStepRequest, spec: JobSpec) -> str | None:
    """Why a sample cannot be trained on; None when it can."""
    sample = item.sample
    if sample.id.job_id != request.job_id:
        return f"it belongs to another job than {request.job_id}"
    if not math.isfinite(item.advantage):
        return f"its advantage is {item.advantage}: drop it"
    if not sample.HasField("trajectory") or not sample.HasField("prompt_embeds"):
        return "it carries no trajectory and prompt embeds: only samples for training do"
    if spec.teachers and item.teacher not in spec.teachers:
        return f"its teacher is {item.teacher[:64]!r}, the job's are {', '.join(spec.teachers)}"
    return problem_of(sample, request.samples[0].sample, spec)
