"""The model card of an export: how to load it, which weights it holds, and what the controller told of its training."""

from collections.abc import Iterator
from dataclasses import dataclass

from flowfleet.hub import HubName, origin_of
from flowfleet.job.adapter_files import DIFFUSERS_FILE
from flowfleet.job.model_files import Kind, Weights
from flowfleet.job.spec import JobSpec
from flowfleet.models.loading import DTYPE_KEYWORD


@dataclass(frozen=True)
class Loaded:
    """Library and class that load an exported model."""

    library: str
    name: str
    """Name of the class in that library."""
    components: tuple[str, ...]
    """Names of the trained transformers."""


def model_card(
    spec: JobSpec, kind: Kind, weights: Weights, loaded: Loaded, job_id: str, step: int, training: str
) -> str:
    """Markdown with the metadata that model hubs read."""
    base = origin_of(spec.model.path)
    metadata = [
        "---",
        *([f"base_model: {base.repo}"] if base else []),
        f"library_name: {loaded.library}",
        "tags:",
        *(f"- {tag}" for tag in ("flowfleet", "reinforcement-learning", *(["lora"] if kind == "adapter" else []))),
        "---",
    ]
    text = [
        *metadata,
        "",
        f"# {spec.name}, step {step}",
        "",
        f"Flowfleet trained this {kind} of `{base or spec.model.path}` with `{spec.algorithm.name}` in job `{job_id}`.",
        f"It holds {_told(spec, weights)}, after {step} training steps, in {spec.model.dtype}.",
        "",
        "## Load it",
        "",
        "```python",
        *_LINES[loaded.library](spec, kind, loaded, base),
        "```",
        "",
        training,
    ]
    return "\n".join(text).rstrip() + "\n"


def _told(spec: JobSpec, weights: Weights) -> str:
    if weights == "average":
        return f"the moving average of the trained weights (`trainer.ema.decay = {spec.trainer.ema.decay}`)"
    if weights == "old policy":
        return "the old policy, which sampled for the loss and follows the trained weights"
    return "the trained weights"


def _text_lines(spec: JobSpec, kind: Kind, loaded: Loaded, base: HubName | None) -> Iterator[str]:
    yield "import torch"
    yield f"from transformers import {loaded.name}"
    yield ""
    yield 'folder = "."  # this folder, or ORG/NAME once it is on a hub'
    source = "folder" if kind == "pipeline" else _place(spec, base)
    yield f"model = {loaded.name}.from_pretrained({source}, dtype=torch.{spec.model.dtype})"
    if kind == "adapter":
        yield "model.load_adapter(folder)"


def _own_lines(spec: JobSpec, kind: Kind, loaded: Loaded, base: HubName | None) -> Iterator[str]:
    """Lines for a family in a layout of its own, which the adapters here load."""
    yield "import torch"
    yield "from flowfleet.models.registry import adapter_for"
    yield ""
    yield 'folder = "."  # this folder'
    source = "folder" if kind == "pipeline" else f'"{base.repo if base else spec.model.path}"'
    yield f"model = adapter_for({source}).load({source}, dtype=torch.{spec.model.dtype})"
    if kind == "adapter":
        yield "from peft import PeftModel"
        yield ""
        yield f"adapted = PeftModel.from_pretrained(model.{loaded.components[0]}, folder)"


def _place(spec: JobSpec, base: HubName | None) -> str:
    """Arguments that name the base."""
    source = f'"{base.repo if base else spec.model.path}"'
    return f'{source}, revision="{base.revision}"' if base and base.revision else source


def _lines(spec: JobSpec, kind: Kind, loaded: Loaded, base: HubName | None) -> Iterator[str]:
    pipeline, components = loaded.name, loaded.components
    yield "import torch"
    yield f"from diffusers import {pipeline}"
    yield ""
    yield 'folder = "."  # this folder, or ORG/NAME once it is on a hub'
    if kind == "pipeline":
        yield f"pipe = {pipeline}.from_pretrained(folder, {DTYPE_KEYWORD}=torch.{spec.model.dtype})"
        return
    source = _place(spec, base)
    yield f"pipe = {pipeline}.from_pretrained({source}, {DTYPE_KEYWORD}=torch.{spec.model.dtype})"
    named = "" if len(components) == 1 else f', weight_name="{DIFFUSERS_FILE}"'
    yield f"pipe.load_lora_weights(folder{named})"
    for component in components[1:]:
        name = DIFFUSERS_FILE.replace(".safetensors", f"_{component}.safetensors")
        yield f'pipe.load_lora_weights(folder, weight_name="{name}", load_into_{component}=True)'


_LINES = {"diffusers": _lines, "transformers": _text_lines, "flowfleet": _own_lines}
"""How an export is loaded, by the library that does."""
