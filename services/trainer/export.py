"""Export of the trained model as people load it, with every checkpoint and at a job's end.

LoRA, for each transformer: diffusers' file, with rank, alpha and targets in its metadata, and PEFT's, which
`PeftModel.from_pretrained` and LoRA servers read.

    pytorch_lora_weights.safetensors     adapter_config.json, adapter_model.safetensors
    pytorch_lora_weights_transformer_2.safetensors     transformer_2/ with the same two, for a second expert

Full: a whole pipeline for `from_pretrained`; what was not trained is linked to the base where the file system can, else
copied. A model that writes text is a folder of transformers, and its adapter PEFT's two files.

Everything is in `model.dtype`, as the rollouts served it when the job was validated. So a job that averages its weights
(`trainer.ema`) exports the average; without one, losses that keep an old policy (DiffusionNFT) export that one.
`flowfleet.json` and the model card say which.
"""

import itertools
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from flowfleet import hub
from flowfleet.filesystem import link_or_copy
from flowfleet.job.adapter_files import DIFFUSERS_FILE, PEFT_CONFIG, PEFT_FILE
from flowfleet.job.model_files import CARD, MANIFEST, Kind, ModelFile, ModelManifest, Weights
from flowfleet.job.spec import JobSpec
from flowfleet.models.trainable import adapter_writer
from flowfleet.proto.rollout_pb2 import Bucket
from flowfleet.weights import weights
from flowfleet.weights.files import sort_metadata
from services.trainer.checkpoints.fence import Fence
from services.trainer.checkpoints.files import digest_of
from services.trainer.model.card import Loaded, model_card
from services.trainer.model.engine import Engine, lora_spec
from services.trainer.model.loading import persistent

SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True)
class About:
    """Facts about the training that go into a model's folder."""

    job_id: str
    step: int
    card: str = ""
    """The controller's part of the model card: how the training went."""


def export(engine: Engine, directory: Path, fence: Fence, about: About) -> Path:
    """Collective. Replaces `directory` by the trained model and returns it."""
    aside = directory.with_name(f".{directory.name}.{fence.attempt}.partial")
    is_writer = engine.ranks.rank == 0
    with engine.ranks.together():
        if is_writer:
            for left in directory.parent.glob(f".{directory.name}.*partial"):
                shutil.rmtree(left, ignore_errors=True)
    write_model(engine, aside, about)
    with engine.ranks.together():
        if is_writer:
            fence.put(aside, directory)
    return directory


def write_model(engine: Engine, folder: Path, about: About) -> dict[str, str]:
    """Collective. Writes the model to a new folder; rank 0 gets file → digest, without files linked from the base."""
    is_writer = engine.ranks.rank == 0
    with engine.ranks.together():
        if is_writer:
            folder.mkdir(parents=True)
            if not engine.is_lora:
                _link_base(engine, folder)
    linked = _files_in(folder) if is_writer else set()
    tensors = engine.full_tensors(evaluated=True)
    with engine.ranks.together():
        try:
            if is_writer and not engine.is_lora:
                _write_experts(engine, folder, tensors)
            elif is_writer:
                _write_adapters(engine, dict(tensors), folder)
        finally:
            for _ in tensors:
                pass  # ranks gather together to the end
        digests = _describe(engine, folder, about, "adapter" if engine.is_lora else "pipeline") if is_writer else {}
    return {name: digest for name, digest in digests.items() if name not in linked}


def model_bytes(engine: Engine) -> int:
    """Estimates the size of `write_model`'s files: adapters twice, or the trained transformers."""
    elements: int = sum(parameter.numel() for parameter in engine.trained.values())
    return elements * engine.dtype.itemsize * (2 if engine.is_lora else 1)


def exported_weights(spec: JobSpec) -> Weights:
    """Which of a job's weights are exported; see `Policies.weights`."""
    if spec.averages:
        return "average"
    return "old policy" if spec.samples_old_policy else "trained"


def _describe(engine: Engine, folder: Path, about: About, kind: Kind) -> dict[str, str]:
    """Writes the card and the manifest. Returns file → digest, of all files."""
    spec, names = engine.spec, list(engine.experts)
    made = Loaded(engine.kind.layout.library, engine.kind.loaded_by(engine.adapter).__name__, tuple(names))
    text = model_card(spec, kind, exported_weights(spec), made, about.job_id, about.step, about.card)
    (folder / CARD).write_text(text, encoding="utf-8")
    digests = {}
    for name in sorted(_files_in(folder)):
        digests[name] = digest_of(folder / name) if (folder / name).stat().st_size else "00000000"
        engine.ranks.beats.beat()
    manifest = ModelManifest(
        job_id=about.job_id,
        step=about.step,
        kind=kind,
        weights=exported_weights(spec),
        base_model=spec.model.path,
        dtype=spec.model.dtype,
        files={
            name: ModelFile(size_bytes=(folder / name).stat().st_size, crc32=digest) for name, digest in digests.items()
        },
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    return digests | {MANIFEST: digest_of(folder / MANIFEST)}


def _files_in(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def _write_adapters(engine: Engine, state: dict[str, Tensor], path: Path) -> None:
    """PEFT's file of each transformer, and diffusers' where the model is of diffusers, which names the only transformer
    that it knows `transformer`, in the second's file as well."""
    part = lora_spec(engine.spec)
    config = {"r": part.rank, "lora_alpha": part.alpha, "target_modules": list(part.target_modules)}
    stem = Path(DIFFUSERS_FILE).stem
    for number, component in enumerate(engine.experts):
        layers = {name: part.cpu().contiguous() for name, part in _of_component(component, state).items()}
        if engine.kind.layout.library == "diffusers":
            name = DIFFUSERS_FILE if number == 0 else f"{stem}_{component}.safetensors"
            with _disk_errors():
                adapter_writer(engine.adapter.pipeline_class)(
                    path, transformer_lora_layers=layers, transformer_lora_adapter_metadata=config, weight_name=name
                )
            sort_metadata(path / name)
            _share(path / name)
        _write_peft(engine, path if number == 0 else path / component, layers)


def _write_peft(engine: Engine, path: Path, layers: Mapping[str, Tensor]) -> None:
    part, base = lora_spec(engine.spec), hub.origin_of(engine.spec.model.path)
    config: Any = LoraConfig(
        r=part.rank,
        lora_alpha=int(part.alpha) if part.alpha.is_integer() else part.alpha,  # type: ignore[arg-type]
        target_modules=sorted(part.target_modules),
        base_model_name_or_path=base.repo if base else engine.spec.model.path,
        revision=base.revision or None if base else None,
        inference_mode=True,
    )
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    path.mkdir(exist_ok=True)
    (path / PEFT_CONFIG).write_text(json.dumps(plain, indent=1, sort_keys=True), encoding="utf-8")
    state = {f"base_model.model.{name}": tensor for name, tensor in layers.items()}
    _save(state, path / PEFT_FILE)


def _save(state: dict[str, Tensor], path: Path) -> None:
    with _disk_errors():
        save_file(state, path, metadata={"format": "pt"})
    _share(path)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Raises OSError where safetensors raises its own for it."""
    try:
        yield
    except SafetensorError as error:
        match = re.search(r"os error (\d+)", str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), str(error)) from None


def _share(path: Path) -> None:
    """Gives a file the mode that the umask asks for: safetensors lets its owner alone read it."""
    probe = path.with_name(f".{path.name}.mode")
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    path.chmod(mode & 0o777)


def _of_component(component: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A component's tensors by their names inside it."""
    prefix = f"{component}."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _write_experts(engine: Engine, path: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """`tensors` come component by component. Buffers of the checkpoint, which nothing trains, follow them."""
    for component, expert in engine.experts.items():
        of_component = _of_component(component, engine.trained)
        buffers = {name: tensor for name, tensor in persistent(expert) if not isinstance(tensor, nn.Parameter)}
        shards = weights.make_buckets(weights.specs_of(of_component | buffers, engine.dtype), SHARD_BYTES)
        expert_tensors = itertools.chain(itertools.islice(tensors, len(of_component)), buffers.items())
        _write_transformer(engine, component, path, shards, expert_tensors)


def _write_transformer(
    engine: Engine, component: str, path: Path, shards: list[Bucket], tensors: Iterator[tuple[str, Tensor]]
) -> None:
    """Shards of at most `SHARD_BYTES`, so that host memory never holds the whole model."""
    kind, layout = engine.kind, engine.kind.layout
    folder = path / layout.folder(component)
    rest = dict(kind.untouched(engine.folder, engine.experts[component]))
    others = weights.make_buckets(weights.specs_of(rest), SHARD_BYTES)
    places: dict[str, str] = {}
    count, total = len(shards) + len(others), 0
    for number, shard in enumerate([*shards, *others]):
        state: dict[str, Tensor] = {}
        for spec in shard.parameters:
            if number < len(shards):
                state |= {name: part.cpu().contiguous() for name, part in kind.stored(spec.name, next(tensors)[1])}
            else:
                state[spec.name] = rest[spec.name]
        file = (
            f"{layout.stem}-{number + 1:05d}-of-{count:05d}.safetensors" if count > 1 else f"{layout.stem}.safetensors"
        )
        places |= dict.fromkeys(state, file)
        total += sum(tensor.nbytes for tensor in state.values())
        _save(state, folder / file)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / layout.index_file).write_text(json.dumps(index), encoding="utf-8")


def _link_base(engine: Engine, path: Path) -> None:
    """Everything of the base but the trained weights."""
    layout, base = engine.kind.layout, engine.folder
    trained = {(base / layout.folder(component)).resolve() for component in engine.experts}

    def skip(folder: str, names: list[str]) -> list[str]:
        inside = Path(folder).resolve() in trained
        return [name for name in names if name.startswith(".") or (inside and layout.is_weights(name))]

    shutil.copytree(base, path, ignore=skip, copy_function=link_or_copy, dirs_exist_ok=True)
