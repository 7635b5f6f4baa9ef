"""The trained model as people load it.

LoRA: `pytorch_lora_weights.safetensors`, written by diffusers with rank, alpha and targets in its metadata, for
`pipeline.load_lora_weights(folder)`. diffusers keeps one transformer's adapter in a file; that of the second expert is
`pytorch_lora_weights_transformer_2.safetensors`, for `load_lora_weights(folder, weight_name=that,
load_into_transformer_2=True)`. Full: a whole pipeline for `from_pretrained`; what was not trained is linked to the base
where the file system can, else copied.

LoRA with `trainer.lora.merge`: such a pipeline too, its transformers' weights read from the base once more and written
with scale · B A added, shard by shard.

Everything is in `model.dtype`: what the rollouts served when the job was validated. So a job that averages its weights
(`trainer.ema`) exports the average; without one, losses that keep an old policy (DiffusionNFT) export that one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flowfleet.job.spec import JobSpec
from flowfleet.proto.rollout_pb2 import Bucket
from flowfleet.weights import weights
from services.trainer.checkpoints.fence import Fence
from services.trainer.model.engine import Engine, lora_spec
from services.trainer.model.loading import persistent

SHARD_BYTES = 4 * 2**30
_WEIGHTS = "diffusion_pytorch_model"
_ADAPTER = "pytorch_lora_weights"


def export(engine: Engine, directory: Path, fence: Fence) -> Path:
    """Collective. Replaces `directory` by the trained model and returns it."""
    aside = directory.with_name(f".{directory.name}.{fence.attempt}.partial")
    is_writer = engine.ranks.rank == 0
    with engine.ranks.together():
        if is_writer:
            for left in directory.parent.glob(f".{directory.name}.*partial"):
                shutil.rmtree(left, ignore_errors=True)
            aside.mkdir(parents=True)
            if exports_pipeline(engine.spec):
                _link_base(Path(engine.spec.model.path), aside, engine.experts)
    tensors = engine.full_tensors(evaluated=True)
    with engine.ranks.together():
        try:
            if is_writer and not engine.is_lora:
                _write_experts(engine, aside, tensors)
            elif is_writer and exports_pipeline(engine.spec):
                _write_merged(engine, aside, dict(tensors))
            elif is_writer:
                _write_adapters(engine, dict(tensors), aside)
        finally:
            for _ in tensors:
                pass  # ranks gather together to the end
        if is_writer:
            fence.put(aside, directory)
    return directory


def exports_pipeline(spec: JobSpec) -> bool:
    """Whether the export is a whole pipeline, not an adapter."""
    return spec.trainer.mode == "full" or spec.trainer.lora.merge


def _write_adapters(engine: Engine, state: dict[str, Tensor], path: Path) -> None:
    """One file a transformer. diffusers names the only one it knows `transformer`, in the second's file as well."""
    pipeline = engine.adapter.pipeline_class
    part = lora_spec(engine.spec)
    config = {"r": part.rank, "lora_alpha": part.alpha, "target_modules": list(part.target_modules)}
    for number, component in enumerate(engine.experts):
        pipeline.save_lora_weights(
            path,
            transformer_lora_layers=_of_component(component, state),
            transformer_lora_adapter_metadata=config,
            weight_name=None if number == 0 else f"{_ADAPTER}_{component}.safetensors",
        )


def _of_component(component: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A component's tensors by their names inside it."""
    return {
        name.removeprefix(f"{component}."): tensor.cpu().contiguous()
        for name, tensor in state.items()
        if name.startswith(f"{component}.")
    }


def _write_experts(engine: Engine, path: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """`tensors` come component by component."""
    for component in engine.experts:
        of_component = {
            name.removeprefix(f"{component}."): tensor
            for name, tensor in engine.trained.items()
            if name.startswith(f"{component}.")
        }
        specs = weights.specs_of(of_component, engine.dtype)
        _write_transformer(path / component, weights.make_buckets(specs, SHARD_BYTES), tensors)


def _write_merged(engine: Engine, path: Path, adapter: Mapping[str, Tensor]) -> None:
    for component, expert in engine.experts.items():
        base = {name: tensor for name, tensor in persistent(expert) if ".lora_" not in name}
        shards = weights.make_buckets(weights.specs_of(base), SHARD_BYTES)
        _write_transformer(path / component, shards, _merged(engine, component, base, adapter))


def _merged(
    engine: Engine, component: str, base: Mapping[str, Tensor], adapter: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of a transformer by the names, and in the order and dtypes, of `base`; sums are of float32."""
    source, part = engine.source(component), engine.spec.trainer.lora
    for name, tensor in base.items():
        if not isinstance(tensor, nn.Parameter):
            stored = source.buffer(name)
            yield name, tensor if stored is None else stored.to(tensor.dtype)
            continue
        weight = source.rows(name, tensor.shape, slice(None))
        module = f"{component}.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in adapter:
            weight = weight.to(engine.ranks.device, torch.float32)
            down, up = (adapter[f"{module}.lora_{factor}.weight"].to(weight) for factor in "AB")
            weight += (part.alpha / part.rank) * (up.flatten(1) @ down.flatten(1)).view_as(weight)
        yield name, weight.to(tensor.dtype)


def _write_transformer(path: Path, shards: list[Bucket], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Shards of at most `SHARD_BYTES`, so that host memory never holds the whole model."""
    names = [_shard_name(number, len(shards)) for number in range(len(shards))]
    for shard, file in zip(shards, names, strict=True):
        state = {spec.name: next(tensors)[1].cpu().contiguous() for spec in shard.parameters}
        save_file(state, path / file, metadata={"format": "pt"})
    if len(shards) > 1:
        (path / f"{_WEIGHTS}.safetensors.index.json").write_text(json.dumps(_index(shards, names)), encoding="utf-8")


def _shard_name(number: int, count: int) -> str:
    return f"{_WEIGHTS}.safetensors" if count == 1 else f"{_WEIGHTS}-{number + 1:05d}-of-{count:05d}.safetensors"


def _index(shards: list[Bucket], names: list[str]) -> dict[str, Any]:
    total = sum(weights.spec_bytes(spec) for shard in shards for spec in shard.parameters)
    places = {spec.name: file for shard, file in zip(shards, names, strict=True) for spec in shard.parameters}
    return {"metadata": {"total_size": total}, "weight_map": places}


def _link_base(base: Path, path: Path, experts: Iterable[str]) -> None:
    """Everything of the base but the transformers' weights."""
    trained = {(base / component).resolve() for component in experts}

    def skip(folder: str, names: list[str]) -> list[str]:
        inside = Path(folder).resolve() in trained
        return [name for name in names if name.startswith(".") or (inside and name.startswith(_WEIGHTS))]

    shutil.copytree(base, path, ignore=skip, copy_function=_link_or_copy, dirs_exist_ok=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
