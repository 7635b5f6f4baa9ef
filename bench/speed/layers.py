"""A model too large for one device, at full width with a few layers: time per layer, and from it of the full depth.

    python -m bench.speed.layers [--layers 2] [--sizes 512 1024] [--batch 1 4] [--compile] [--out FILE]

HunyuanImage-3.0 with random weights in bfloat16: the forward without gradient, and forward and backward of a LoRA on
attention and the shared expert, with each block checkpointed and without. A layer is timed by itself on the hidden
states that reach it, what is outside the layers by the difference to the whole. Figures of the full depth are
extrapolated, on a device that would hold it: of a forward outside + depth × layer, of a LoRA step depth × layer alone.
One JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.h200 import machine
from flowfleet.models.families.hunyuan_image3.transformer import HunyuanImage3Transformer, TransformerConfig

FULL: Final = TransformerConfig(
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    num_experts=64,
    top_k=8,
    expert_width=3072,
    shared_width=3072,
    latent_channels=32,
    patch_width=1024,
    eps=1e-5,
    rope_theta=10000.0,
    uses_qk_norm=True,
)
"""The published size."""
TINY: Final = replace(
    FULL,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=8,
    top_k=2,
    expert_width=32,
    shared_width=32,
    patch_width=32,
)
TARGETS: Final = ["qkv_proj", "o_proj", "shared_mlp.gate_and_up_proj", "shared_mlp.down_proj"]
TEXT_TOKENS: Final = 128
PIXELS_PER_TOKEN: Final = 16
WARM_UP: Final = 3
PEAK_TFLOPS: Final = 989.0
"""Dense bfloat16 of an H100 or H200."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.speed.layers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rank", type=int, default=8, help="of the LoRA")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a tiny width, for a laptop")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    measured = measure(options)
    line = json.dumps(measured)
    print(line, flush=True)
    if options.out:
        options.out.write_text(json.dumps(as_row(measured), indent=1) + "\n")


def as_row(measured: dict[str, Any]) -> dict[str, Any]:
    """A file of bench/results."""
    compiled = " --compile" if measured["compile"] else ""
    return {"machine": machine(), "command": f"bench.speed.layers{compiled}", "gpus": 1, "figures": [measured]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = replace(TINY if options.tiny else FULL, num_layers=options.layers)
    begun = time.perf_counter()
    model = make_model(config, device, options.rank)
    figures = []
    for size in options.sizes:
        for batch in options.batch:
            figures.append(Case(model, config, size, batch, options).figures())
            print(f"{size}² × {batch}: {figures[-1]}", flush=True)
    return {
        "bench": "layers",
        "model": "HunyuanImage-3.0",
        "is_tiny": options.tiny,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "compile": options.compile,
        "layers": options.layers,
        "depth": FULL.num_layers,
        "rank": options.rank,
        "text_tokens": TEXT_TOKENS,
        "layer_params": sum(p.numel() for n, p in model.model.layers[0].named_parameters() if ".lora_" not in n),
        "figures": figures,
        "seconds": time.perf_counter() - begun,
    }


def make_model(config: TransformerConfig, device: torch.device, rank: int) -> HunyuanImage3Transformer:
    """Random weights in bfloat16, frozen, with a LoRA in bfloat16: a trainer's float32 one would be cast first."""
    with torch.device("meta"):
        model = HunyuanImage3Transformer(config)
    model = model.to(torch.bfloat16).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim > 1:
            parameter.normal_(std=0.02, generator=generator)
        else:
            parameter.fill_(1.0)
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS)
    inject_adapter_in_model(lora, model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(device, torch.bfloat16)
            nn.init.normal_(parameter, std=0.01)
            parameter.requires_grad_(True)
    return model.eval()


class Case:
    """One size and batch."""

    def __init__(
        self, model: HunyuanImage3Transformer, config: TransformerConfig, size: int, batch: int, options: Any
    ) -> None:
        self._model, self._config, self._size, self._batch = model, config, size, batch
        self._repeats = options.repeats
        self._device = next(model.parameters()).device
        side = size // PIXELS_PER_TOKEN
        self._latents = torch.randn(batch, config.latent_channels, side, side, device=self._device)
        self._times = torch.full((batch,), 700.0, device=self._device)
        self._embeds = torch.randn(batch, TEXT_TOKENS, config.hidden_size, device=self._device).bfloat16()
        self._num_tokens = TEXT_TOKENS + 1 + side * side
        self._layer: Any = model.model.layers[0]
        self._call: Callable[..., Tensor] = torch.compile(self._layer.forward) if options.compile else self._layer

    def figures(self) -> dict[str, Any]:
        arguments = self._hidden()
        forward = self._timed(lambda: self._no_grad(self._call, *arguments))
        whole = self._timed(lambda: self._no_grad(self._model, self._latents, self._times, self._embeds))
        eager = self._timed(lambda: self._no_grad(self._layer, *arguments))
        outside = max(0.0, whole - self._config.num_layers * eager)
        found = {
            "size": self._size,
            "batch": self._batch,
            "tokens": self._num_tokens,
            "forward_ms": forward,
            "outside_ms": outside,
            "forward_tflops": self.layer_flops() / forward / 1e9,
            "mfu": self.layer_flops() / forward / 1e9 / PEAK_TFLOPS,
            "forward_depth_ms": outside + FULL.num_layers * forward,
        }
        for name, is_kept in (("trained", True), ("trained_checkpointed", False)):
            self._reset_peak()
            milliseconds = self._timed(lambda is_kept=is_kept: self._train(arguments, is_kept))  # type: ignore[misc]
            found[f"{name}_ms"] = milliseconds
            found[f"{name}_depth_ms"] = FULL.num_layers * milliseconds
            found[f"{name}_peak_gib"] = self._peak_gib()
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}

    def layer_flops(self) -> float:
        """Matrix products and attention of a layer's forward, without the LoRA."""
        c, tokens = self._config, self._batch * self._num_tokens
        width, inner = c.hidden_size, c.num_heads * c.head_dim
        linears = width * (inner + 2 * c.num_kv_heads * c.head_dim) + inner * width + width * c.num_experts
        mlp = 3 * width * (c.shared_width + c.top_k * c.expert_width)
        attention = 2 * inner * self._num_tokens  # scores and values of one query
        return float(2 * tokens * (linears + mlp + attention))

    def _hidden(self) -> list[Any]:
        """Arguments of the first layer in a forward of the model."""
        caught: list[Any] = []
        handle = self._layer.register_forward_pre_hook(lambda _, given: caught.append(given))
        self._no_grad(self._model, self._latents, self._times, self._embeds)
        handle.remove()
        return list(caught[0])

    def _train(self, arguments: list[Any], is_kept: bool) -> None:
        hidden = arguments[0].detach().requires_grad_(True)
        if is_kept:
            out = self._call(hidden, *arguments[1:])
        else:
            out = checkpoint(self._call, hidden, *arguments[1:], use_reentrant=False)
        torch.autograd.backward([out], [torch.ones_like(out)])
        self._model.zero_grad()

    @staticmethod
    def _no_grad(call: Callable[..., Tensor], *arguments: Any) -> None:
        with torch.no_grad():
            call(*arguments)

    def _timed(self, run: Callable[[], None]) -> float:
        """Median milliseconds of a run."""
        for _ in range(WARM_UP):
            run()
        seen = []
        for _ in range(self._repeats):
            self._synchronize()
            start = time.perf_counter()
            run()
            self._synchronize()
            seen.append((time.perf_counter() - start) * 1e3)
        return statistics.median(seen)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _peak_gib(self) -> float:
        return torch.cuda.max_memory_allocated(self._device) / 2**30 if self._device.type == "cuda" else 0.0


if __name__ == "__main__":
    main()
