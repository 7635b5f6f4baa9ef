"""Where does the time of a forward of Qwen-Image's blocks go, kernel by kernel?

    python -m bench.speed.kernels [--base plain|fp8] [--rank 64] [--adapter separate|merged|peft] [--unfused]
        [--batch 16] [--layers 6] [--backward]

A transformer of `--layers` real blocks, compiled, with an adapter of random factors on all of the family's targets.
Prints milliseconds an image, as of all 60 blocks, then the kernels that take most of them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.speed.full_size import write_checkpoint
from flowfleet.hardware import devices
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Size
from flowfleet.proto.rollout_pb2 import LoraSpec
from flowfleet.quantization import fused
from flowfleet.weights import lora
from services.rollout.engines.acceleration import accelerate, adapt

REAL_LAYERS = 60


def main() -> None:
    options = _options()
    device = devices.pick_device()
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), num_layers=options.layers, tiny=options.tiny)
        adapter = adapter_for(path).load(
            path, dtype=torch.bfloat16, device=device, components=("transformer",), load_format="dummy"
        )
    quantization = "fp8_base" if options.base == "fp8" else "none"
    accelerate(adapter.experts, compile=not options.eager, quantization=quantization)
    fused.ALLOWED = not options.unfused
    if options.rank:
        part = LoraSpec(rank=options.rank, alpha=2.0 * options.rank, target_modules=adapter.lora_targets)
        for parameter in lora.install_lora(adapter.experts, part).values():
            parameter.data.normal_(std=0.01)
        if options.adapter != "peft":
            adapt(adapter.experts, compile=True, merged=options.adapter == "merged")
    size = Size(options.size, options.size)
    latents = torch.randn(options.batch, *adapter.latent_shape(size), device=device)
    prompts = adapter.blank_prompts(options.batch, options.text)
    prompts.embeds.normal_()

    def run() -> None:
        with torch.set_grad_enabled(options.backward):
            velocity: Tensor = adapter.velocity(latents, torch.tensor(700.0), prompts, size=size)
            if options.backward:
                torch.autograd.backward(velocity.square().mean())

    seconds = [_timed(run, device) for _ in range(3 + options.repeat)][3:]
    share = REAL_LAYERS / options.layers / options.batch
    took = statistics.median(seconds) * 1e3 * share
    print(f"{vars(options)}\n{took:.2f} ms an image, of {REAL_LAYERS} blocks", flush=True)
    if devices.is_accelerator(device):
        for name, milliseconds, count in _kernels(run)[: options.top]:
            print(f"  {milliseconds * share:6.2f} ms an image  x{count:4d}  {name[:120]}")


def _timed(run: Any, device: torch.device) -> float:
    devices.synchronize(device)
    start = time.perf_counter()
    run()
    devices.synchronize(device)
    return time.perf_counter() - start


def _kernels(run: Any) -> list[tuple[str, float, int]]:
    """Name, milliseconds and count, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.accelerator.synchronize()
    events: Any = profiled.key_averages()
    rows = [(event.key, event.self_device_time_total / 1e3, event.count) for event in events]
    return sorted(rows, key=lambda row: -row[1])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.speed.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", choices=("plain", "fp8"), default="plain")
    parser.add_argument("--rank", type=int, default=64, help="of the adapter; 0: none (64)")
    parser.add_argument(
        "--adapter", choices=("separate", "merged", "peft"), default="separate", help="peft: its own layers, as trained"
    )
    parser.add_argument("--unfused", action="store_true", help="quantize by kernels of its own")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--size", type=int, default=512, help="pixels of a side (512)")
    parser.add_argument("--text", type=int, default=128, help="tokens of a prompt (128)")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--top", type=int, default=16, help="kernels that are printed (16)")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a laptop")
    return parser.parse_args()


if __name__ == "__main__":
    main()
