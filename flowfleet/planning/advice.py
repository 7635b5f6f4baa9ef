"""Advice for a job that does not fit its devices: the smallest changes that make it fit, each tried."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from flowfleet.job.spec import JobSpec
from flowfleet.planning.facts import Facts
from flowfleet.planning.memory import GIB, RESERVE, rollout_memory, trainer_memory

MOST_RANKS = 64

Change = dict[str, Any]
"""Settings of `trainer` by name; `state` is the optimizer's."""


def advise(spec: JobSpec, facts: Facts, limit: float) -> list[str]:
    """Lines for a person; none where both a rank and a replica keep within `limit` bytes."""
    return [*_trainer(spec, facts, limit), *_rollout(spec, facts, limit)]


def _trainer(spec: JobSpec, facts: Facts, limit: float) -> Iterator[str]:
    if trainer_memory(spec, facts, limit + RESERVE).peak <= limit:
        return
    fitting = ([change for change in option if _fits(spec, facts, change, limit)] for option in _options(spec))
    lines = [_line(spec, facts, enough[0], limit) for enough in fitting if enough]
    if lines:
        yield from (f"trainer: {line}" for line in lines)
        return
    least: Change = {"gradient_checkpointing": "full", "micro_batch_size": 1}
    moved: list[Change] = [{"offload": "activations", "state": "device"}] if spec.trainer.mode == "lora" else []
    more = [{}, *moved, *_ranks(spec)]
    together = next((least | change for change in more if _fits(spec, facts, least | change, limit)), None)
    if together is None:
        yield f"trainer: does not fit on {MOST_RANKS} such devices either"
    else:
        yield f"trainer: {_line(spec, facts, together, limit)}"


def _options(spec: JobSpec) -> Iterator[list[Change]]:
    """Changes of each setting that may be enough, the smallest first."""
    part = spec.trainer
    is_moved = part.offloads("optimizer")
    yield [{"state": "8bit"}, {"state": "host"}] if part.optimizer.state == "device" and not is_moved else []
    fp32: Change = {"state": "device"} if part.optimizer.state == "8bit" else {}
    yield [{"offload": "optimizer", **fp32}] if part.mode == "lora" and not is_moved else []
    has_inputs = part.mode == "lora" and part.gradient_checkpointing == "full"
    yield [{"offload": "activations", **fp32}] if has_inputs and part.offload != "activations" else []
    policies = ["none", "selective", "full"]
    stronger = policies[policies.index(part.gradient_checkpointing) + 1 :]
    yield [{"gradient_checkpointing": policy} for policy in stronger]
    yield [{"micro_batch_size": rows} for rows in _halves(part.micro_batch_size)]
    yield [{"sharding": "fsdp"}] if part.mode == "lora" and part.world_size > 1 else []
    yield _ranks(spec)
    yield [{"samples": "no"}] if part.samples != "no" else []


def _ranks(spec: JobSpec) -> list[Change]:
    doublings = (spec.trainer.world_size << shift for shift in range(1, MOST_RANKS.bit_length()))
    spread: Change = {"sharding": "fsdp"} if spec.trainer.mode == "lora" else {}
    return [{"world_size": count, **spread} for count in doublings if count <= MOST_RANKS]


def _rollout(spec: JobSpec, facts: Facts, limit: float) -> Iterator[str]:
    memory = rollout_memory(spec, facts, limit + RESERVE)
    if memory.peak <= limit:
        return
    fixed = memory.peak - memory.parts["activations"]
    for rows in _halves(spec.rollout.batch_size):
        held = max(facts.sampling_bytes * rows / spec.rollout.batch_size, facts.decode_bytes)
        if fixed + held <= limit:
            yield f"rollout: rollout.batch_size = {rows} needs {(fixed + held) / GIB:.0f} GiB"
            return
    yield f"rollout: weights and one row need {(fixed + facts.decode_bytes) / GIB:.0f} GiB: take larger devices"


def _halves(count: int) -> list[int]:
    return [count >> shift for shift in range(1, count.bit_length())]


def _fits(spec: JobSpec, facts: Facts, change: Change, limit: float) -> bool:
    return trainer_memory(_changed(spec, change), facts, limit + RESERVE).peak <= limit


def _changed(spec: JobSpec, change: Change) -> JobSpec:
    part = spec.trainer
    rest = {name: value for name, value in change.items() if name != "state"}
    if "state" in change:
        rest["optimizer"] = part.optimizer.model_copy(update={"state": change["state"]})
    return spec.model_copy(update={"trainer": part.model_copy(update=rest)})


def _line(spec: JobSpec, facts: Facts, change: Change, limit: float) -> str:
    peak = trainer_memory(_changed(spec, change), facts, limit + RESERVE).peak
    named = {"optimizer.state" if name == "state" else name: json.dumps(value) for name, value in change.items()}
    return f"{', '.join(f'trainer.{name} = {value}' for name, value in named.items())} needs {peak / GIB:.0f} GiB"
