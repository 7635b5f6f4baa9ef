"""Requirements that a trainer has of a family's classes, asked before it trains."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from diffusers.loaders import QwenImageLoraLoaderMixin
from torch import nn

_SAVED: Final = ("transformer_lora_layers", "transformer_lora_adapter_metadata", "weight_name")


def require_trainable(experts: Mapping[str, nn.Module], pipeline_class: Any = None, *, lora: bool) -> None:
    """Raises ValueError, with what to add to a class, for transformers that cannot be split or adapted, or a diffusers
    pipeline that cannot save their adapter. Otherwise only the export would find the last, after all training."""
    for expert in experts.values():
        blocks_of(expert)
        if lora:
            require_adapters(type(expert), pipeline_class)


def require_adapters(transformer_class: Any, pipeline_class: Any = None) -> None:
    """Raises ValueError as `require_trainable`, for classes that an adapter needs."""
    if not hasattr(transformer_class, "add_adapter"):
        raise ValueError(
            f"{transformer_class.__name__} takes no adapter: derive it from diffusers.loaders.PeftAdapterMixin, or set "
            'trainer.mode = "full"'
        )
    if pipeline_class is not None:
        known = inspect.signature(adapter_writer(pipeline_class)).parameters
        if missing := [name for name in _SAVED if name not in known]:
            raise ValueError(
                f"{pipeline_class.__name__}.save_lora_weights takes no {missing[0]}: derive the pipeline from a LoRA "
                'loader mixin of diffusers.loaders, such as FluxLoraLoaderMixin, or set trainer.mode = "full"'
            )


def adapter_writer(pipeline_class: Any) -> Callable[..., None]:
    """Returns the pipeline's `save_lora_weights`; for one without a LoRA loader another pipeline's, whose file its
    transformer reads by `load_lora_adapter`."""
    own: Callable[..., None] | None = getattr(pipeline_class, "save_lora_weights", None)
    return own or QwenImageLoraLoaderMixin.save_lora_weights


def blocks_of(expert: nn.Module) -> list[nn.Module]:
    """Blocks by the class names that diffusers' models list. Raises ValueError for a transformer without them:
    otherwise nothing would be split, checkpointed or compiled, unnoticed until the memory is full."""
    names = set(getattr(expert, "_no_split_modules", None) or ())
    named = [module for module in expert.modules() if type(module).__name__ in names]
    blocks = [module for module in named if not any(type(part).__name__ in names for part in _inside(module))]
    if not blocks:
        raise ValueError(
            f"{type(expert).__name__} cannot be split into blocks: set its class attribute _no_split_modules to the "
            f"class names of its transformer blocks; it has {', '.join(sorted(names)) or 'none'} now"
        )
    return blocks


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of a module: transformers lists encoders as well as their layers, and the layers are the blocks."""
    return (part for part in module.modules() if part is not module)
