"""Loads a flow for a replica without a peak: a float8 base block by block, the text encoder where it has room.

No more of the transformer than a block is ever there in `model.dtype`. A text encoder that would leave too little of
the device for samples lies in host memory, and comes to the device for each prompt, a layer at a time.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from flowfleet.hardware import devices
from flowfleet.hardware.streaming import stream
from flowfleet.models import level_tables
from flowfleet.models.base import ModelAdapter
from flowfleet.models.files import Prefixed, WeightFiles
from flowfleet.models.level_tables import LevelLayers
from flowfleet.models.loading import ALL_COMPONENTS, Component, LoadFormat, dummy_parameter, fill_dummy
from flowfleet.planning.replicas import keeps_encoder
from flowfleet.proto.rollout_pb2 import ModelSpec
from flowfleet.quantization import layers
from flowfleet.weights.weights import dtype_of
from services.rollout.engines.acceleration import blocks
from services.rollout.engines.local import load_format

log = logging.getLogger(__name__)

Tabled = Callable[[ModelAdapter], LevelLayers | None]
"""Which layers of a model's transformers get a table; None: none."""


def load_by_blocks(
    kind: Any,
    model: ModelSpec,
    device: torch.device,
    beat: Callable[[], None] = lambda: None,
    tabled: Tabled = lambda _: None,
) -> ModelAdapter:
    """Loads all components of a family. The transformers become float8 bases, with tables in place of `tabled`.

    Raises ValueError as the family's `load`, and for a device or dtype without float8 products.
    """
    layers.require_fp8(device, dtype_of(model.dtype), "model.base = 'fp8'", emulated=True)
    adapter = load_others(kind, model, device, lambda: sum(map(_float8_bytes, _bare(kind, model, tabled).values())))
    sources = _Sources(kind, model, device)
    for component, expert in _bare(kind, model, tabled, sources, beat).items():
        for name, block in blocks(expert).items():
            sources.fill(component, block, f"{name}.")
            layers.replace_weights([block])
            beat()
        sources.fill(component, expert, "")
        setattr(adapter.pipeline, component, expert.to(device))
    return adapter


def load_plain(kind: Any, model: ModelSpec, device: torch.device) -> ModelAdapter:
    """Loads all components of a family, weights as they are stored. Raises ValueError as the family's `load`."""
    copies = 1.5 if model.quantization == "fp8" else 1.0

    def transformer_bytes() -> float:
        return copies * _bytes(_parameters(_bare(kind, model)))

    if _has_room(kind, model, device, transformer_bytes):
        return _load(kind, model, device, ALL_COMPONENTS)
    adapter = load_others(kind, model, device, transformer_bytes)
    for component, expert in _load(kind, model, device, ("transformer",)).experts.items():
        setattr(adapter.pipeline, component, expert)
    return adapter


def load_shares(kind: Any, model: ModelSpec, device: torch.device, mesh: DeviceMesh, *, others: bool) -> ModelAdapter:
    """Collective. Loads the transformers of a family, of which this device keeps its part: FSDP2's, a block at a time.
    `others`: besides, the components that only one of the devices needs.

    Raises ValueError as the family's `load`.
    """
    sources, experts = _Sources(kind, model, device), _bare(kind, model)
    mesh = DeviceMesh.from_group(mesh.get_group(), device.type, mesh_dim_names=("fsdp",))  # PEFT goes by the name
    if others:
        adapter = load_others(kind, model, device, lambda: _bytes(_parameters(experts)) / mesh.size())
    else:
        adapter = _load(kind, model, torch.device("cpu"), ("transformer",), "empty")
        adapter.device = device
    for component, expert in experts.items():
        for name, block in blocks(expert).items():
            sources.fill(component, block, f"{name}.")
            fully_shard(block, mesh=mesh)
        sources.fill(component, expert, "")
        fully_shard(expert.to(device), mesh=mesh)
        setattr(adapter.pipeline, component, expert)
    held = _bytes(parameter.to_local() for parameter in _parameters(experts))
    log.info("holds %.0f %% of the weights of %s", 100 * held / _bytes(_parameters(experts)), model.path)
    return adapter


def load_others(
    kind: Any, model: ModelSpec, device: torch.device, transformer_bytes: Callable[[], float] = lambda: 0.0
) -> ModelAdapter:
    """Loads all components but the transformers, of which so much is yet to come."""
    if _has_room(kind, model, device, transformer_bytes):
        return _load(kind, model, device, ("text_encoder", "vae"))
    adapter, is_dummy = _load(kind, model, device, ("vae",)), load_format(model) == "dummy"
    encoders = _load(kind, model, torch.device("cpu"), ("text_encoder",), "empty" if is_dummy else None)
    for part in kind.parts["text_encoder"]:
        module = getattr(encoders.pipeline, part, None)
        if isinstance(module, nn.Module):
            if is_dummy:
                fill_dummy(module, part, device, held_on="cpu")
            stream(module, device)
        setattr(adapter.pipeline, part, module)
    return adapter


def _load(
    kind: Any,
    model: ModelSpec,
    device: torch.device,
    components: tuple[Component, ...],
    format: LoadFormat | None = None,
) -> ModelAdapter:
    adapter: ModelAdapter = kind.load(
        model.path,
        dtype=dtype_of(model.dtype),
        device=device,
        components=components,
        load_format=format or load_format(model),
    )
    return adapter


def _bare(
    kind: Any,
    model: ModelSpec,
    tabled: Tabled = lambda _: None,
    sources: "_Sources | None" = None,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, nn.Module]:
    """Transformers on the meta device, with tables, whose weights come from `sources`."""
    adapter = _load(kind, model, torch.device("cpu"), ("transformer",), "empty")
    if (found := tabled(adapter)) is not None:
        for component, expert in adapter.experts.items():
            level_tables.install(expert, found, partial(sources.whole, component) if sources else None, beat)
    return adapter.experts


def _has_room(kind: Any, model: ModelSpec, device: torch.device, transformer_bytes: Callable[[], float]) -> bool:
    """Returns True if the text encoder can be on the device. A family with files of its own has a small one."""
    free, memory = devices.free_bytes(device), devices.memory_bytes(device)
    if free is None or memory is None or kind.stored is not None:
        return True
    bare = _load(kind, model, torch.device("cpu"), ("text_encoder",), "empty")
    parts = [getattr(bare.pipeline, part, None) for part in kind.parts["text_encoder"]]
    encoders = sum(_bytes(part.parameters()) for part in parts if isinstance(part, nn.Module))
    return keeps_encoder(free, transformer_bytes() + encoders, memory)


class _Sources:
    """Stored or dummy weights of the transformers."""

    def __init__(self, kind: Any, model: ModelSpec, device: torch.device) -> None:
        self._model, self._device, self._dtype = model, device, dtype_of(model.dtype)
        self._layout, self._names = kind.layout, kind.stored
        self._files: dict[str, WeightFiles] = {}

    def fill(self, component: str, module: nn.Module, prefix: str) -> None:
        """Fills what is on the meta device of a transformer's module with this prefix."""
        if load_format(self._model) == "dummy":
            fill_dummy(module, f"{component}.{prefix}".rstrip("."), self._device)
        else:
            self._of(component).fill(module, Prefixed(prefix, self._names), self._device, self._dtype)

    def whole(self, component: str, name: str, shape: Iterable[int]) -> Tensor:
        """A parameter of a transformer, also one that it no longer has."""
        if load_format(self._model) == "dummy":
            return dummy_parameter(f"{component}.{name}", tuple(shape), torch.float32, self._device)
        return self._of(component).tensor(name)

    def _of(self, component: str) -> WeightFiles:
        folder = self._layout.folder(component)
        if folder not in self._files:
            self._files[folder] = WeightFiles(Path(self._model.path) / folder, self._layout)
        return self._files[folder]


def _float8_bytes(expert: nn.Module) -> float:
    """Bytes of a float8 base, which is on the meta device in `model.dtype`."""
    parts = list(blocks(expert).values())
    linears = (linear.weight.numel() for linear in layers.large_linears(parts))  # type: ignore[operator]
    matrices = (getattr(module, name).numel() for module, name in layers.large_experts(parts))
    return _bytes(expert.parameters()) - sum(chain(linears, matrices))


def _parameters(experts: Mapping[str, nn.Module]) -> Iterable[Any]:
    return chain.from_iterable(expert.parameters() for expert in experts.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
