"""LoRA adapter: injected the same way by trainer and replicas, named as diffusers names it on disk.

A published adapter is a safetensors blob whose keys are those of `pytorch_lora_weights.safetensors`, for example
`transformer.transformer_blocks.0.attn.to_q.lora_A.weight`; the component comes before the first dot. The hashes of a
weight update use the same names.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from diffusers.utils import recurse_remove_peft_layers
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from flowfleet.errors import DataLoss
from flowfleet.proto.rollout_pb2 import LoraSpec
from flowfleet.weights.weights import copy_into

ADAPTER = "default"

Experts = Mapping[str, nn.Module]
"""Transformers by the name of their component: one, or two (`ModelAdapter.experts`)."""


def lora_config(lora: LoraSpec) -> LoraConfig:
    """PEFT's configuration of a job's adapter."""
    alpha: Any = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha  # PEFT's type says int, any number will do.
    return LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        target_modules=list(lora.target_modules),
        init_lora_weights="gaussian",
    )


def install_lora(
    experts: Experts, lora: LoraSpec, seed: int = 0, *, dtype: torch.dtype | None = None
) -> dict[str, nn.Parameter]:
    """Freezes the transformers, injects the adapter into each and returns its parameters by published name.

    It starts at `initial_values`. `dtype` of the adapter; None takes the transformer's. Raises ValueError for a target
    that the model does not have.
    """
    parameters = inject_lora(experts, lora, dtype=dtype)
    for name, start in initial_values(parameters, lora, seed):
        parameters[name].data.copy_(start)
    return parameters


def inject_lora(experts: Experts, lora: LoraSpec, *, dtype: torch.dtype | None = None) -> dict[str, nn.Parameter]:
    """Installs an adapter whose values follow later; on the meta device where the model is. See `install_lora`."""
    wanted = {component: dtype or _dtype(module) for component, module in experts.items()}
    for transformer in experts.values():
        _inject(transformer, lora)
    parameters = named_adapter_parameters(experts)
    for name, parameter in parameters.items():
        parameter.data = torch.empty_like(parameter, dtype=wanted[name.partition(".")[0]])
    return parameters


def _dtype(transformer: nn.Module) -> torch.dtype:
    """Returns a transformer's dtype, even if parts of it are a float8 base."""
    return next(parameter.dtype for parameter in transformer.parameters() if parameter.itemsize > 1)


def initial_values(parameters: Mapping[str, Tensor], lora: LoraSpec, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the initial value of each adapter parameter: whole, float32 on the CPU, one at a time in the given order.

    A is drawn from N(0, 1/rank²) by a CPU generator with `seed`, B is zero, so that the model starts unchanged.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in parameters.items():
        start = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            start.normal_(std=1 / lora.rank, generator=generator)
        yield name, start


def remove_lora(experts: Experts) -> None:
    """Takes the adapter out again."""
    for transformer in experts.values():
        adapted: Any = transformer
        if hasattr(adapted, "unload_lora"):
            adapted.unload_lora()
            continue
        recurse_remove_peft_layers(adapted)  # a model of transformers, which has no such method
        del adapted.peft_config
        adapted._hf_peft_config_loaded = False


def named_adapter_parameters(experts: Experts) -> dict[str, nn.Parameter]:
    """The adapter's parameters by published name, in the model's order."""
    infix = f".{ADAPTER}."
    return {
        f"{component}.{name.replace(infix, '.')}": parameter
        for component, transformer in experts.items()
        for name, parameter in transformer.named_parameters()
        if ".lora_" in name and infix in name
    }


def load_adapter(experts: Experts, state: Mapping[str, Tensor]) -> list[str]:
    """Copies a published adapter into the installed one and returns the names. Raises ValueError unless they match."""
    parameters = named_adapter_parameters(experts)
    copy_adapter(parameters, state)
    return list(parameters)


def copy_adapter(parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copies a published adapter into tensors by the same names. Raises ValueError unless they match."""
    _check_names(parameters, state)
    into = copy_into(parameters)
    for name, value in state.items():
        into(name, value)


def check_adapter(parameters: Mapping[str, Tensor], state: Mapping[str, Tensor], rank: int) -> None:
    """Raises ValueError unless a published adapter of that rank fits where these parameters are, of any rank."""
    _check_names(parameters, state)
    for name, parameter in parameters.items():
        inner, outer = (1, 0) if ".lora_A." in name else (0, 1)
        given, wanted = state[name], {inner: parameter.shape[inner], outer: rank}
        if given.dtype != parameter.dtype or given.shape != (wanted[0], wanted[1]):
            raise ValueError(
                f"the adapter does not fit the model: {name} is {given.dtype} {tuple(given.shape)}, expected "
                f"{parameter.dtype} {(wanted[0], wanted[1])}"
            )


def _check_names(parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    missing, extra = sorted(parameters.keys() - state.keys()), sorted(state.keys() - parameters.keys())
    if missing or extra:
        raise ValueError(
            f"the adapter does not fit the model: missing {missing[:3]}, unexpected {extra[:3]}; rank, target modules "
            "and base model must be those of the trainer"
        )


def adapter_to_bytes(state: Mapping[str, Tensor]) -> bytes:
    """safetensors of a published adapter; tensors from any device, full (not sharded)."""
    data: bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})
    return data


def adapter_from_bytes(data: bytes) -> dict[str, Tensor]:
    """The inverse of `adapter_to_bytes`, on the CPU. Raises DataLoss when the bytes are no safetensors."""
    try:
        state: dict[str, Tensor] = load(data)
    except (SafetensorError, ValueError) as error:
        raise DataLoss(f"the adapter blob cannot be read: {error}; publish it again") from None
    return state


@contextmanager
def adapter_disabled(experts: Experts) -> Iterator[None]:
    """Inside, the transformers compute as they did before training: the reference policy.

    It sets PEFT's switch alone. PEFT's own `disable_adapters` would also take `requires_grad` from the parameters,
    which backward and FSDP read.
    """
    layers = [
        module
        for transformer in experts.values()
        for module in transformer.modules()
        if isinstance(module, BaseTunerLayer)
    ]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_is_on(transformer: nn.Module) -> bool:
    """Returns True if the transformer has an adapter and computes with it."""
    layer = next((module for module in transformer.modules() if isinstance(module, BaseTunerLayer)), None)
    return layer is not None and not layer._disable_adapters


def _inject(transformer: nn.Module, lora: LoraSpec) -> None:
    for target in lora.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name, _ in transformer.named_modules()):
            raise ValueError(f"trainer.lora.target_modules: the model has no module {target!r}")
    transformer.requires_grad_(False)
    device = next(transformer.parameters()).device
    with torch.random.fork_rng(), device if device.type == "meta" else nullcontext():
        adapted: Any = transformer
        config = lora_config(lora)
        config.exclude_modules = getattr(transformer, "lora_excluded", None)
        adapted.add_adapter(config, adapter_name=ADAPTER)
