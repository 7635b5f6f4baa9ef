"""Checkpoints: `<directory>/step-00000012/`, complete or not there at all.

Tensors are written by torch.distributed.checkpoint in its safetensors storage (files.py), each rank its own shards.
Another number of ranks can read them. They are the trained weights, AdamW's two moments, each rank's generator states,
and if the job has them the old policy and the average. torch's usual storage is avoided because it keeps its metadata
as a pickle.

`state.json` has the rest: the record of applied steps, the optimizer's steps and all updates, the loss's scale, the
names, sizes and digests of all files, and its own digest. `model/` has the exported model (services/trainer/export.py)
if the job exports one with each checkpoint.

A folder is written under a temporary name and renamed when everything in it is on disk. Each trainer has a temporary
name of its own, because a trainer that was given up may still write. All ranks must share the directory.

A checkpoint that differs from what was written is set aside (set_aside.py), and the next older one is used.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowfleet.errors import Conflict, DataLoss, FlowfleetError, Full, InvalidRequest
from flowfleet.hardware import devices
from flowfleet.job.model_files import FOLDER
from flowfleet.process.clock import steady_time
from services.trainer.checkpoints import files
from services.trainer.checkpoints.fence import Fence
from services.trainer.checkpoints.set_aside import kept_aside, set_aside
from services.trainer.checkpoints.state import FORMAT, complete_state, read_state, write_state
from services.trainer.parallel.sharding import local, num_shards
from services.trainer.record import Record

if TYPE_CHECKING:
    from services.trainer.model.engine import Engine

STALE_S = 3600.0
"""Age of the last change after which a folder is considered abandoned."""
ROOM_BYTES = 2**24
"""Free space required besides a checkpoint's tensors, for `state.json` and the file system."""
WriteModel = Callable[[Path], dict[str, str]]
"""Collective. Writes the model to a new folder; rank 0 gets file → digest."""
_NAME = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(r"\.step-(\d{8,})\.(?:(\w+)\.)?partial")

warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)  # a world of one


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one job."""

    directory: Path
    job_id: str
    keep_last: int
    token: str = field(default_factory=lambda: secrets.token_hex(4))
    """Token of this trainer, chosen by rank 0."""

    @cached_property
    def fence(self) -> Fence:
        """Rank 0 looks at it before it completes anything."""
        return Fence(self.directory)

    def take_over(self) -> None:
        """Makes this trainer the job's current one; rank 0 calls it. An earlier trainer that wakes completes nothing.
        What it was writing aside goes, at once and as a whole, so that it cannot even be renamed."""
        self.fence.take()
        for left in self.directory.glob(".step-*partial"):
            ours = left.with_name(f"{left.name.removesuffix('partial')}{self.token}.gone")
            with suppress(OSError):  # its owner has just renamed it
                os.rename(left, ours)
        for gone in self.directory.glob(".step-*.gone"):
            shutil.rmtree(gone, ignore_errors=True)

    def save(
        self,
        engine: Engine,
        record: Record,
        write_model: WriteModel | None = None,
        *,
        model_bytes: int = 0,
        keep: Collection[int] = (),
    ) -> Path:
        """Collective. Writes the state of `record.version` unless it is there already; forgets the oldest ones, but not
        those of the steps `keep`. `write_model` adds the model, of about `model_bytes`.

        Raises Full while there is no room for it, and leaves nothing behind then.
        """
        ranks = engine.ranks
        name = f"step-{record.version:08d}"
        path = self.directory / name
        aside = self.directory / f".{name}.{ranks.broadcast(self.token.encode()).decode()}.partial"
        with ranks.together():
            exists = complete_state(path) is not None
        if exists:
            return path
        engine.reshard()
        tensors = _tensors(engine)
        needed = int(ranks.sum(torch.tensor(sum(map(_written_bytes, tensors.values())))))
        needed += ROOM_BYTES + model_bytes
        try:
            with ranks.together():
                if ranks.rank == 0:
                    self._clean(record.version - 1)
                    self._make_room(needed)
                    aside.mkdir(parents=True)
                    self.fence.check()  # after it, so that whoever takes over sees the folder or is seen
            with ranks.together():
                digests = files.write(tensors, aside, ranks)
            if write_model is not None:
                written = write_model(aside / FOLDER)
                digests |= {f"{FOLDER}/{name}": digest for name, digest in written.items()}
            with ranks.together():
                if ranks.rank == 0:
                    self._complete(aside, path, engine, record, digests)
                    self._forget(keep)
        except FlowfleetError as error:
            if ranks.rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
            if isinstance(error, Full):
                raise Full(self._no_room(needed)) from None
            raise
        return path

    def choose(self, misfit: Callable[[Record], str], *, from_start: bool = True) -> Path | None:
        """The newest complete checkpoint without a misfit, by rank 0; None where the job begins at step 0. Sets aside
        newer ones, and what is damaged.

        Raises OtherFormat. Raises DataLoss where no complete checkpoint will do and the job cannot begin at step 0
        either, by `from_start`. They stay where they are.
        """
        misfits: dict[Path, str] = {}
        chosen = None
        for path in self._paths():
            try:
                reason = misfit(Record.from_json(read_state(path)["record"]))
            except DataLoss as error:
                set_aside(path, str(error))
            else:
                if not reason:
                    chosen = path
                    break
                misfits[path] = reason
        if chosen is None and misfits and not from_start:
            told = "; ".join(f"{path.name}: {reason}" for path, reason in misfits.items())
            raise DataLoss(
                f"no checkpoint goes with the ledger ({told}). Redis and {self.directory} are of two times: put a "
                "matching copy of one of them back, then resume the job; or cancel it and begin a new one from its "
                "newest checkpoint"
            )
        for path, reason in misfits.items():
            set_aside(path, reason)
        return chosen

    def load(self, engine: Engine, path: Path) -> Record:
        """Collective. Puts a checkpoint into model, optimizer and generators, and verifies it meanwhile.

        Raises Conflict if it does not fit. Raises DataLoss if it differs from what was written: it was set aside, and
        the engine must be rebuilt.
        """
        ranks = engine.ranks
        try:
            return self._load(engine, path)
        except DataLoss as error:
            with ranks.together():
                if ranks.rank == 0:
                    set_aside(path, str(error))
            raise

    def start_from(self, engine: Engine, path: Path) -> None:
        """Collective. Puts another job's checkpoint into model, optimizer and generators; steps begin at 0.

        Raises InvalidRequest if it does not fit, or differs from what was written. It stays where it is.
        """
        try:
            self._load(engine, path, is_own=False)
        except (Conflict, DataLoss) as error:
            raise InvalidRequest(f"trainer.resume: {error}") from None

    def _load(self, engine: Engine, path: Path, *, is_own: bool = True) -> Record:
        with engine.ranks.together():
            state = read_state(path)
            is_foreign = is_own and state["job_id"] != self.job_id
            if is_foreign or state["parameters"] != _fingerprint(engine):
                whose, advice = (f" of job {self.job_id}", ": use an empty directory") if is_own else ("", "")
                raise Conflict(
                    f"{path} is no checkpoint{whose} with this model and adapter, and with moments in as many bits "
                    f"(trainer.optimizer.state){advice}"
                )
            record = Record.from_json(state["record"])
        tensors = _tensors(engine)
        has_average = "updates" in state  # not if it was written before there were averages
        if not has_average:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("ema.")}
        if state["world_size"] != engine.ranks.world_size:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("rng.")}
        files.read_verified(tensors, path, state, engine.ranks)
        _adopt(engine, tensors, state["optimizer_steps"])
        engine.policies.num_updates = state.get("updates", max(state["optimizer_steps"].values()))
        if not has_average:
            engine.policies.start_average()
        engine.loss_scale.restore(state.get("loss_scale", {}))
        return record

    @property
    def oldest(self) -> int:
        """Steps in the oldest checkpoint that is kept as one of the newest; 0 without any."""
        return min(self.steps[: self.keep_last], default=0)

    @property
    def newest(self) -> int:
        """Steps in the newest checkpoint; 0 without any."""
        return max(self.steps, default=0)

    @property
    def steps(self) -> list[int]:
        """Steps in each checkpoint, newest first."""
        return [int(path.name.removeprefix("step-")) for path in self._paths()]

    def _paths(self) -> list[Path]:
        """Newest first."""
        if not self.directory.is_dir():
            return []
        numbered = [(int(match[1]), path) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(numbered, reverse=True)]

    def _complete(self, aside: Path, path: Path, engine: Engine, record: Record, digests: dict[str, str]) -> None:
        """The last steps, by rank 0: `state.json`, everything to disk, and the name."""
        state = {
            "format": FORMAT,
            "job_id": self.job_id,
            "world_size": engine.ranks.world_size,
            "parameters": _fingerprint(engine),
            "files": {
                file.relative_to(aside).as_posix(): file.stat().st_size
                for file in sorted(aside.rglob("*"))
                if file.is_file()
            },
            "digests": digests,
            "optimizer_steps": engine.optimizer.num_steps(),
            "updates": engine.policies.num_updates,
            "loss_scale": engine.loss_scale.to_json(),
            "record": record.to_json(),
        }
        if engine.is_lora:
            state["lora_alpha"] = engine.spec.trainer.lora.alpha
        write_state(aside, state)
        for file in (*aside.rglob("*"), aside):
            _sync(file)
        self.fence.put(aside, path)
        _sync(self.directory)
        self._clean(record.version)

    def _forget(self, keep: Collection[int]) -> None:
        for old in self._paths()[self.keep_last :]:
            if int(old.name.removeprefix("step-")) not in keep:
                shutil.rmtree(old, ignore_errors=True)

    def _clean(self, step: int) -> None:
        """Deletes leftovers: our own, of steps up to this one, and abandoned ones."""
        for left in self.directory.glob(".step-*partial"):
            match = _ASIDE.fullmatch(left.name)
            if match and (match[2] == self.token or int(match[1]) <= step or _age_s(left) > STALE_S):
                shutil.rmtree(left, ignore_errors=True)

    def _make_room(self, needed: int) -> None:
        """Raises Full before anything is written. What was set aside goes first."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for old in kept_aside(self.directory):
            if self._free() < needed:
                shutil.rmtree(old.path, ignore_errors=True)
        if self._free() < needed:
            raise Full(self._no_room(needed))

    def _no_room(self, needed: int) -> str:
        return (
            f"no space for a checkpoint: {self.directory} has {self._free():,} bytes free of the {needed:,} that it "
            "needs besides those that are kept (schedule.keep_last). Free some: the job then continues by itself"
        )

    def _free(self) -> int:
        return shutil.disk_usage(self.directory).free


def _tensors(engine: Engine) -> dict[str, Tensor]:
    """Everything by name; loading writes into these very tensors."""
    tensors = {f"trained.{name}": parameter.detach() for name, parameter in engine.trained.items()}
    states = devices.rng_state(engine.ranks.device)
    rng = {f"rng.{engine.ranks.rank}.{kind}": state for kind, state in states.items()}
    return tensors | engine.optimizer.moments() | engine.policies.state() | rng


def _written_bytes(tensor: Tensor) -> int:
    """This rank's share of what is written of a tensor: replicas write it once."""
    held = local(tensor).nbytes
    return held * num_shards(tensor) // tensor.device_mesh.size() if isinstance(tensor, DTensor) else held


def _adopt(engine: Engine, tensors: dict[str, Tensor], optimizer_steps: dict[str, int]) -> None:
    """Hands counts and generator states to their owners; parameters, moments and old policy were loaded in place."""
    engine.optimizer.restore(optimizer_steps)
    prefix = f"rng.{engine.ranks.rank}."
    rng = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if rng:
        devices.set_rng_state(engine.ranks.device, rng)


def _fingerprint(engine: Engine) -> str:
    """sha256 over names and shapes of the trained weights, and over the bits of a moment, 8 or 32."""
    text = "\n".join(f"{name} {list(parameter.shape)}" for name, parameter in sorted(engine.trained.items()))
    if engine.spec.trainer.optimizer.state == "8bit":
        text += "\n8bit"
    return hashlib.sha256(text.encode()).hexdigest()


def _age_s(folder: Path) -> float:
    """Since anything in it changed."""
    try:
        return steady_time() - max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:  # its owner has just renamed it
        return 0.0


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
