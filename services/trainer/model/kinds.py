"""Differences between a flow and a model that writes text, as far as the engine is concerned."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowfleet.algorithms.coarse import check_noise
from flowfleet.algorithms.losses import limits
from flowfleet.job.spec import JobSpec
from flowfleet.models.base import ModelAdapter
from flowfleet.models.files import WeightFiles
from flowfleet.models.loading import StoredNames
from flowfleet.models.sequences.stored_names import WHOLE, fused, stored, stored_name
from flowfleet.models.weight_files import Layout
from services.trainer.model.loading import CheckpointSource, Source, persistent


class ModelKind:
    """A kind of model. Here a flow, whose folder is a pipeline of diffusers, or the family's own."""

    def __init__(self, layout: Layout) -> None:
        """`layout`: where the model's folders hold the weights."""
        self.layout = layout

    def stored(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Returns a parameter as it is written to files: one or more named tensors."""
        return [(name, tensor)]

    def loaded_by(self, adapter: Any) -> type:
        """Returns the library's class that loads the folder."""
        pipeline_class: type = adapter.pipeline_class
        return pipeline_class

    def check(self, spec: JobSpec, adapter: Any) -> int:
        """Returns how many elements a log-prob is a mean over. Raises ValueError for settings that do not fit the
        model."""
        adapter.limit_tokens(spec.model.max_sequence_length)
        num_elements: int = math.prod(adapter.latent_shape(spec.rollout.size))
        check_held_out(spec, adapter)
        limits(spec.algorithm, num_elements)
        rollout = spec.rollout
        check_noise(spec, adapter.schedule(rollout.num_inference_steps, rollout.size, rollout.shift))
        return num_elements

    def source(self, folder: Path, component: str) -> Source:
        """The stored weights of a component."""
        return CheckpointSource(folder / self.layout.folder(component), self.layout)

    def untouched(self, folder: Path, expert: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Tensors in the files of the trained transformer that belong to other components."""
        return iter(())


def check_held_out(spec: JobSpec, adapter: ModelAdapter) -> None:
    """Raises ValueError for a size of held-out samples that the model cannot draw."""
    try:
        adapter.latent_shape(spec.validation_size)
    except ValueError as error:
        raise ValueError(f"schedule.validation_height and validation_width: {error}") from None


class FlatFlowModel(ModelKind):
    """See `ModelKind`. The files hold all components under `StoredNames` (flowfleet/models/loading.py)."""

    def __init__(self, layout: Layout, names: StoredNames) -> None:
        super().__init__(layout)
        self._names = names

    def stored(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        names = self._names.of(name, len(tensor))
        return [(names[0], tensor)] if len(names) == 1 else zip(names, tensor, strict=True)

    def source(self, folder: Path, component: str) -> Source:
        return FlatSource(folder, self.layout, self._names)

    def untouched(self, folder: Path, expert: nn.Module) -> Iterator[tuple[str, Tensor]]:
        files = WeightFiles(folder, self.layout)
        taken = {part for name, tensor in persistent(expert) for part in self._names.of(name, len(tensor))}
        yield from ((name, files.tensor(name)) for name in files if name not in taken)


class FlatSource(Source):
    """See `Source`. Of experts that are stored one by one, those of `rows` alone are read."""

    def __init__(self, folder: Path, layout: Layout, names: StoredNames) -> None:
        """Raises ValueError as `WeightFiles`."""
        self._files, self._stored = WeightFiles(folder, layout), names

    def check(self, expert: nn.Module) -> None:
        base = [(name, tensor) for name, tensor in persistent(expert) if ".lora_" not in name]
        self._files.check([(name, self._stored.of(name, len(tensor)), tuple(tensor.shape)) for name, tensor in base])

    def rows(self, name: str, shape: Sequence[int], rows: slice) -> Tensor:
        return self._files.rows(self._stored.of(name, shape[0]), rows)


class SequenceModel(ModelKind):
    """See `ModelKind`. The folder is a model of transformers, or the family's own."""

    def stored(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        return stored(name, tensor)

    def loaded_by(self, adapter: Any) -> type:
        model_class: type = adapter.model_class
        return model_class

    def check(self, spec: JobSpec, adapter: Any) -> int:
        """Refuses to train an output layer that is tied to the embeddings, because it is a tensor of its own here."""
        if spec.trainer.mode == "full" and adapter.transformer.config.tie_word_embeddings:
            raise ValueError(
                'trainer.mode = "full" would pull the output layer of this model apart from its embeddings, to which '
                'it is tied (tie_word_embeddings): set trainer.mode = "lora"'
            )
        return 1

    def source(self, folder: Path, component: str) -> Source:
        return TransformersSource(folder, self.layout)


class TransformersSource(CheckpointSource):
    """The safetensors of a transformers model; see flowfleet/models/sequences/stored_names.py."""

    def check(self, expert: nn.Module) -> None:
        """See `Source`."""
        missing = [name for name, _ in persistent(expert) if ".lora_" not in name and not self._names(name)]
        if missing:
            raise ValueError(
                f"{self._files.folder} has no weights for {len(missing)} tensors, the first is {missing[0]}"
            )
        head, table = self._place("lm_head.weight"), self._place("model.embed_tokens.weight")
        config: Any = getattr(expert, "config", None)
        is_tied = head and table and config is not None and config.tie_word_embeddings
        if is_tied and not torch.equal(self._files.tensor(head), self._files.tensor(table)):
            raise ValueError(
                f"{self._files.folder} ties its output layer to the embeddings (tie_word_embeddings in config.json), "
                f"but holds another {head}, and loaders differ in which they take: set tie_word_embeddings to false, "
                "or save the model again"
            )
        for name, tensor in persistent(expert):
            if ".lora_" not in name and (shape := self._shape(name, tensor)) != tuple(tensor.shape):
                raise ValueError(
                    f"{name} in {self._files.folder} has shape {shape}, its configuration says {(*tensor.shape,)}"
                )

    def rows(self, name: str, shape: Sequence[int], rows: slice) -> Tensor:
        """See `Source`. Of experts that are stored one by one, those of `rows` alone are read."""
        layout = fused(name)
        if self._place(stored_name(name)) or layout is None:
            return super().rows(self._names(name)[0], shape, rows)
        experts = range(shape[0])[rows]
        read = [torch.cat([self._files.tensor(self._place(part)) for part in layout.of(expert)]) for expert in experts]
        return torch.stack(read)

    def _names(self, name: str) -> list[str]:
        """Stored names of a parameter, the first expert's if all experts share it; empty where it is absent."""
        layout, stored_as = fused(name), stored_name(name)
        candidates = [stored_as] if layout is None or self._place(stored_as) else layout.of(0)
        if name == "lm_head.weight" and not self._place(stored_as):  # tied: the embeddings
            candidates = ["model.embed_tokens.weight"]
        in_files = [self._place(candidate) for candidate in candidates]
        return in_files if all(in_files) else []

    def _place(self, name: str) -> str:
        """A stored name as these files have it; "" where it is absent."""
        return next((candidate for candidate in (name, WHOLE + name) if candidate in self._files), "")

    def _shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        shapes = [self._files.shape(file_name) for file_name in self._names(name)]
        if self._place(stored_name(name)) or fused(name) is None:
            return shapes[0]
        return (len(tensor), sum(shape[0] for shape in shapes), *shapes[0][1:])


def model_kind(spec: JobSpec, adapter: Any) -> ModelKind:
    """A flow, or a model that writes text, with the family's layout."""
    if spec.writes_tokens:
        return SequenceModel(adapter.layout)
    names = getattr(adapter, "stored", None)
    return FlatFlowModel(adapter.layout, names) if names else ModelKind(adapter.layout)
