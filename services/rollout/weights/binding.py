"""Binding of a replica and the group that it joins: read from InitWeightTransfer and checked as a whole, so that a
request that cannot work leaves the replica as it is."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

import torch

from flowfleet.hardware import devices
from flowfleet.process.service import check_host
from flowfleet.proto import rollout_pb2
from flowfleet.redis.keys import check_job_id
from flowfleet.weights import weights
from services.rollout.engines.acceleration import QUANTIZATIONS
from services.rollout.engines.base import RolloutEngine

MAX_WORLD_SIZE: Final = 65_536
MAX_TIMEOUT_S: Final = 24 * 3600.0
MAX_RANK: Final = 65_536
"""Maximum rank of an adapter."""
_LOAD_FORMATS: Final = ("", "safetensors", "dummy")
_GROUP_ID: Final = re.compile(r"[A-Za-z0-9._:/-]{1,256}")


@dataclass(frozen=True)
class Binding:
    """Job and model that the engine was prepared for."""

    job_id: str
    model: rollout_pb2.ModelSpec
    lora: rollout_pb2.LoraSpec | None


def read_binding(request: rollout_pb2.InitWeightTransferRequest) -> Binding:
    """Job, model and adapter of a request. Raises ValueError that names the field to change."""
    return _binding(request.job_id, request.model, request.lora if request.HasField("lora") else None)


def read_adapter(job_id: str, adapter: rollout_pb2.Adapter, engine: RolloutEngine) -> Binding:
    """The same of an adapter that a replica with that engine is to fetch."""
    if not engine.slots:
        raise ValueError(f"adapter: the engine {engine.name} of this replica serves one job at a time: publish to it")
    if adapter.lora.merged:
        raise ValueError("adapter.lora.merged: a merged adapter changes the base, which jobs share: publish it")
    return _binding(job_id, adapter.model, adapter.lora)


def base_of(adapter: rollout_pb2.Adapter) -> tuple[bytes, tuple[str, ...]]:
    """Returns what adapters of one replica have in common: the model, whatever computes with it, and the targets."""
    model = rollout_pb2.ModelSpec()
    model.CopyFrom(adapter.model)
    model.ClearField("threads")
    return model.SerializeToString(deterministic=True), tuple(sorted(adapter.lora.target_modules))


def _binding(job_id: str, model: rollout_pb2.ModelSpec, lora: rollout_pb2.LoraSpec | None) -> Binding:
    check_job_id(job_id)
    _check_model(model)
    if lora is None:
        return Binding(job_id, model, None)
    if not 0 < lora.rank <= MAX_RANK or not (math.isfinite(lora.alpha) and lora.alpha > 0):
        raise ValueError(f"lora: give a rank of 1 to {MAX_RANK} and a finite alpha above 0")
    if not lora.target_modules or not all(lora.target_modules):
        raise ValueError("lora.target_modules: name at least one module, none of them empty")
    return Binding(job_id, model, lora)


def read_group(
    request: rollout_pb2.InitWeightTransferRequest, device: torch.device
) -> rollout_pb2.TransferGroup | None:
    """The transfer group of a request, None without one. Raises ValueError for a group that this device cannot join."""
    if not request.HasField("group"):
        return None
    group = request.group
    if not _GROUP_ID.fullmatch(group.group_id):
        raise ValueError(f"group.group_id {group.group_id[:64]!r}: give 1 to 256 letters, digits or ._:/-")
    if group.backend not in (known := ("gloo", devices.backend(device))):
        raise ValueError(
            f"group.backend = {group.backend[:64]!r}: {device} of this replica has {', '.join(set(known))}"
        )
    if not 2 <= group.world_size <= MAX_WORLD_SIZE or not 1 <= group.rank < group.world_size:
        raise ValueError(
            f"group.rank = {group.rank}, group.world_size = {group.world_size}: give a rank from 1 (0 is the trainer) "
            f"below a world size of at most {MAX_WORLD_SIZE}"
        )
    if not 0 < group.timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"group.timeout_s = {group.timeout_s}: give seconds above 0, at most {MAX_TIMEOUT_S:.0f}")
    if not 0 < group.store_port <= 65_535:
        raise ValueError(f"group.store_port = {group.store_port}: give 1 to 65535")
    check_host(group.store_host)
    return group


def _check_model(model: rollout_pb2.ModelSpec) -> None:
    if not model.path:
        raise ValueError("model.path: give the directory of a diffusers pipeline")
    weights.dtype_of(model.dtype)
    if model.load_format not in _LOAD_FORMATS:
        raise ValueError(f"model.load_format = {model.load_format[:64]!r}: give safetensors or dummy")
    if model.quantization not in ("", *QUANTIZATIONS):
        raise ValueError(f"model.quantization = {model.quantization[:64]!r}: give one of {', '.join(QUANTIZATIONS)}")
