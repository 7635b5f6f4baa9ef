"""Rollout pools of a local stack, as `flowfleet up --pool` and `flowfleet pools add` take them.

large                                         a rollout in the pool `large`
large:replicas=2,model=PATH                   two, which load a model at start
large:devices=0-3,sequence_parallel_size=2    two, on two accelerators each

pools.json in the stack's directory has the pools that the supervisor runs. Those that were added while it ran are there
again at its next start.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from flowfleet import hub
from flowfleet.job.files import shipped
from flowfleet.job.sampling import POOL
from flowfleet.local.files import read_own, write_atomically
from flowfleet.local.stack import StackError
from flowfleet.models.registry import Engine
from flowfleet.part import parsed

POOLS_FILE = "pools.json"
DEFAULT = "default"
MOST_DEVICES = 1024


class Pool(BaseModel):
    """A pool's rollouts. Jobs choose it by `rollout.pool`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default=DEFAULT, pattern=POOL)
    replicas: int = Field(default=1, ge=1, le=64)
    model: str | None = None
    """Diffusers pipeline that they load while they start."""
    dtype: str = "float32"
    """Data type of `model`."""
    engine: Engine = "diffusers"
    max_batch: int | None = Field(default=None, ge=1)
    """Most rows of one forward; unset: the rollout's default."""
    adapter_slots: int | None = Field(default=None, ge=0)
    """Adapters of jobs on one base that are ready at once; unset: the rollout's default."""
    sequence_parallel_size: int = Field(default=1, ge=1, le=64)
    """Accelerators of a rollout, which share every sample."""
    devices: tuple[str, ...] | None = None
    """Accelerators, `sequence_parallel_size` a rollout; unset: assigned when the pool starts."""
    added: bool = False
    """True for a pool that was added while the stack ran."""

    @model_validator(mode="after")
    def check(self) -> Pool:
        """Raises ValueError for devices that are not enough or too many."""
        each = self.sequence_parallel_size
        if each > 1 and self.engine != "diffusers":
            raise ValueError(
                f"sequence parallel size {each}: the engine {self.engine} samples on one device: give --engine "
                "diffusers, or engine=diffusers to the pool"
            )
        if self.adapter_slots and (each > 1 or self.engine != "diffusers"):
            raise ValueError(
                f"adapter slots {self.adapter_slots}: only the engine diffusers on one device samples for several jobs "
                "at once: give --adapter-slots 0, or adapter_slots=0 to the pool"
            )
        if self.devices is not None and len(self.devices) != each * self.replicas:
            raise ValueError(
                f"it names {len(self.devices)} accelerators for {self.replicas} rollouts: "
                f"{'one is' if each == 1 else f'{each} are'} for each, change its replicas or its devices"
            )
        return self


_POOLS = TypeAdapter(tuple[Pool, ...])


def parse_pool(text: str, usual: Mapping[str, Any] | None = None) -> Pool:
    """A pool from NAME[:key=value,…], with the `usual` settings where it has none of its own. Raises ValueError."""
    name, colon, rest = text.partition(":")
    settings: dict[str, Any] = {**(usual or {}), "name": name}
    known = sorted(Pool.model_fields.keys() - {"name", "added"})
    for part in re.split(r",(?=\s*[a-z_-]+=)", rest) if colon else ():
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or (key := key.replace("-", "_")) not in known:
            raise ValueError(f"pool {text}: {part!r} is not a setting: write key=value; keys are {', '.join(known)}")
        settings[key] = parse_devices(value) if key == "devices" else model_at(value) if key == "model" else value
    if "replicas" not in settings and "devices" in settings:
        each = str(settings.get("sequence_parallel_size", 1))
        settings["replicas"] = max(1, len(settings["devices"]) // int(each)) if re.fullmatch("[1-9][0-9]?", each) else 1
    try:
        return parsed(Pool, settings)
    except ValueError as error:
        raise ValueError(f"pool {text}: {str(error).removeprefix('body: ')}") from None


def parse_devices(text: str) -> tuple[str, ...]:
    """Accelerators as 0,1 or 0-3. Raises ValueError where one is empty or there twice."""
    found: list[str] = []
    for part in map(str.strip, text.split(",")):
        first, _, last = part.partition("-")
        is_range = first.isdecimal() and last.isdecimal() and int(last) - int(first) < MOST_DEVICES
        found += map(str, range(int(first), int(last) + 1)) if is_range else [part]
    if not all(found) or len(set(found)) < max(1, len(found)):
        raise ValueError(f"devices {text!r}: give each once, as in 0,1 or 0-3")
    return tuple(found)


def model_at(written: str) -> str:
    """The model that rollouts load at start: a folder here, one that comes with the package, or a name of the Hub."""
    if Path(written).is_dir() or (hub.name_of(written) is not None and shipped(written) is None):
        return written
    if (found := shipped(written)) is None:
        raise ValueError(
            f"model {written}: there is no such folder; give a diffusers pipeline's, or ORG/NAME of the Hub"
        )
    return str(found)


def given_twice(names: Iterable[str]) -> str:
    """The first name that is there more than once; empty without any."""
    return next((name for name, count in Counter(names).items() if count > 1), "")


def read_pools(file: Path) -> dict[str, Pool]:
    """Pools by name; none without the file. Raises StackError for one that is not such a list."""
    try:
        return {pool.name: pool for pool in _POOLS.validate_json(read_own(file))}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StackError(f"{file} cannot be read: remove it, and add its pools again: {error}") from None


def write_pools(file: Path, pools: Collection[Pool]) -> None:
    write_atomically(file, _POOLS.dump_json(tuple(pools), indent=2).decode() + "\n")
