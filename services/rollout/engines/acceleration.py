"""Faster forwards of the live transformers, in place: compiled blocks, large linears in float8.

    load → accelerate → install LoRA → adapt → receive weights → refresh → …

`compile` makes each block compile itself at its first forward. All blocks share the compiled code. From the second text
width or batch size on these are dynamic, so a run compiles a handful of times.

flowfleet/quantization does the quantization, which is meant to go with `compile`. `fp8` keeps bfloat16 weights, because
updates bring and hash those, and derives float8 copies from them; `refresh` derives them again after each update.
`fp8_base` keeps float8 weights alone, for jobs that train an adapter on them (`model.base`). An adapter is multiplied
on its own, in fewer passes where blocks are compiled, or merged into copies of the weights
(flowfleet/quantization/adapted.py).
"""

from collections.abc import Hashable, Mapping
from weakref import WeakSet

from torch import nn

from flowfleet.hardware import compiling
from flowfleet.hardware.graphs import Graphs
from flowfleet.process.pulse import Pulse
from flowfleet.quantization import adapted, layers, mixed
from flowfleet.quantization.rows import FP8
from flowfleet.weights.lora import adapter_is_on

Experts = Mapping[str, nn.Module]

QUANTIZATIONS = ("none", "fp8", "fp8_base")
_watching: WeakSet[Pulse] = WeakSet()


def accelerate(experts: Experts, *, compile: bool, quantization: str) -> None:
    """Prepares transformers in place; see the module. To be called once after a load, before LoRA is installed.

    Args:
        experts: transformers by component name.
        compile: whether blocks compile themselves.
        quantization: "none" (or empty), "fp8" or "fp8_base".

    Raises ValueError for another quantization, fp8 on a device or in a dtype that has no such kernels, and transformers
    that do not say what their blocks are.
    """
    if quantization not in ("", *QUANTIZATIONS):
        raise ValueError(f"rollout.quantization = {quantization!r}: give one of {', '.join(QUANTIZATIONS)}")
    for expert in experts.values() if quantization.startswith("fp8") else ():
        first = next(parameter for parameter in expert.parameters() if parameter.dtype != FP8)
        if quantization == "fp8":
            layers.require_fp8(first.device, first.dtype, "rollout.quantization = 'fp8'")
            layers.add_copies(blocks(expert).values())
        else:
            layers.require_fp8(first.device, first.dtype, "model.base = 'fp8'", emulated=True)
            layers.replace_weights(blocks(expert).values())
    if compile:
        compile_blocks(experts)


def adapt(experts: Experts, *, compile: bool, merged: bool) -> None:
    """Prepares installed LoRA layers in place. Eager ones stay PEFT's, as the trainer's are, unless they are merged."""
    for expert in experts.values():
        if merged:
            adapted.put(adapted.MergedLinear, expert.modules())
        elif compile:
            adapted.put(adapted.AdaptedLinear, expert.modules())
    merge(experts)


def merge(experts: Experts) -> None:
    """Rounds the adapter as it is into the copies of the weights; no effect unless it is merged."""
    for expert in experts.values():
        adapted.merge(expert.modules())


def refresh(experts: Experts) -> None:
    """Derives the float8 copies again from the current weights; no effect without quantization."""
    for expert in experts.values():
        layers.refresh(expert.modules())


def capture(experts: Experts) -> list[Graphs]:
    """Has small batches replay CUDA graphs of the transformers, which are to be cleared when an adapter is installed or
    removed."""
    found = []
    for expert in experts.values():
        copies = next((module for module in expert.modules() if "fp8_weight" in module._buffers), None)

        def state(expert: nn.Module = expert, copies: nn.Module | None = copies) -> Hashable:
            # `layers.full_precision` swaps the class
            return adapter_is_on(expert), type(copies), mixed.is_mixing(expert)

        found.append(Graphs(expert, state=state))
    return found


def compile_blocks(experts: Experts, backend: str = "inductor") -> None:
    """Makes each block compile itself at its first forward, by one of torch.compile's backends. Raises ValueError as
    `blocks` does."""
    compiling.prepare()
    for expert in experts.values():
        for block in blocks(expert).values():
            block.compile(backend=backend)


def watch_compilation(pulse: Pulse) -> None:
    """Tells a pulse from now on when code of this process compiles."""
    from torch._dynamo.callback import callback_handler

    if pulse not in _watching:
        _watching.add(pulse)
        callback_handler.register_start_callback(lambda _: pulse.compiling(True))
        callback_handler.register_end_callback(lambda _: pulse.compiling(False))


def blocks(expert: nn.Module) -> dict[str, nn.Module]:
    """The transformer's repeated blocks by name, after the class names that diffusers' and vLLM-Omni's models list."""
    names = {*(getattr(expert, "_no_split_modules", None) or ()), *(getattr(expert, "_repeated_blocks", None) or ())}
    modules = {name: module for name, module in expert.named_modules() if type(module).__name__ in names}
    if not modules:
        raise ValueError(
            f"{type(expert).__name__} does not name its blocks: set its class attribute _no_split_modules to "
            f"their class names, or turn rollout.compile and rollout.quantization off; it has {sorted(names)} now"
        )
    return modules
