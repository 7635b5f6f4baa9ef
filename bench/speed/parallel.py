"""How much faster do several GPUs make one video by sequence parallelism?

    torchrun --nproc-per-node 4 -m bench.speed.parallel [--degrees 1,2,4] [--steps 3] [--eager]
    torchrun --nproc-per-node 4 -m bench.speed.parallel --tiny

One expert of Wan 2.2 A14B at its real size with random weights, 81 frames of 720 by 1280 pixels (75,600 tokens), no
guidance: the rollout's own steps, each a forward and an SDE step. Degrees that fit run side by side on GPUs of their
own. Prints a table, and a line of JSON: for each degree the median seconds of a forward and of a whole step, the
speed-up over one GPU, and how far the first velocity is from that of one GPU (the largest difference over the largest
value, and the root mean square of differences over that of values).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from flowfleet.algorithms.sde import reverse_step
from flowfleet.hardware import devices
from flowfleet.models.families.wan import WanAdapter
from flowfleet.models.settings import Size
from flowfleet.weights.weights import dtype_of
from services.rollout.engines import acceleration, sequence_parallel

WAIT = timedelta(minutes=10)
SHIFT = 5.0
TEXT_TOKENS = 128
TINY_TRANSFORMER = {
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "text_dim": 64,
    "freq_dim": 128,
    "ffn_dim": 384,
    "num_layers": 5,
}
CLASSES = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "UMT5EncoderModel"),
    "tokenizer": ("transformers", "T5TokenizerFast"),
    "transformer": ("diffusers", "WanTransformer3DModel"),
    "transformer_2": (None, None),
    "vae": ("diffusers", "AutoencoderKLWan"),
}


def main() -> None:
    options = _options()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = devices.pick_device(int(os.environ.get("LOCAL_RANK", "0")))
    store = _store(world)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if rank == 0:
            store.set("folder", scratch)
        results = Path(store.get("folder").decode())
        adapter = load(folder, options, device)
        for number, degrees in enumerate(side_by_side(options.degrees, world)):
            first = 0
            for degree in degrees:
                if first <= rank < first + degree:
                    group = PrefixStore(f"degree-{degree}", store)
                    figures, velocity = measure(adapter, options, group, rank - first, degree)
                    if rank == first:
                        (results / f"figures-{degree}").write_text(json.dumps(figures))
                        (results / f"velocity-{degree}").write_bytes(velocity.numpy().tobytes())
                first += degree
            _meet(store, f"phase-{number}", world)
        if rank == 0:
            report(options, adapter, results)


def load(folder: Path, options: argparse.Namespace, device: torch.device) -> WanAdapter:
    """One expert with random weights, the same on every device of a kind, and nothing else."""
    write_checkpoint(folder, tiny=options.tiny)
    dtype = dtype_of(options.dtype)
    return WanAdapter.load(folder, dtype=dtype, device=device, components=("transformer",), load_format="dummy")


def write_checkpoint(directory: Path, *, tiny: bool = False) -> None:
    """Configurations of a Wan checkpoint with one expert, without weights, tokenizer and text encoder."""
    with torch.device("meta"):
        parts: dict[str, Any] = {
            "transformer": WanTransformer3DModel(**(TINY_TRANSFORMER if tiny else {})),
            "vae": AutoencoderKLWan(),
        }
    parts["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    for name, part in parts.items():
        part.save_config(directory / name)
    index = {"_class_name": "WanPipeline", "_diffusers_version": diffusers.__version__, **CLASSES}
    (directory / "model_index.json").write_text(json.dumps(index))


def side_by_side(degrees: Sequence[int], world: int) -> list[list[int]]:
    """The degrees in order, as many at a time as there are ranks. Raises ValueError for one that there are not."""
    phases = list[list[int]]()
    for degree in degrees:
        if not 1 <= degree <= world:
            raise ValueError(f"--degrees {degree}: torchrun started {world} ranks")
        if phases and sum(phases[-1]) + degree <= world:
            phases[-1].append(degree)
        else:
            phases.append([degree])
    return phases


def measure(
    adapter: WanAdapter, options: argparse.Namespace, store: Any, rank: int, degree: int
) -> tuple[dict[str, Any], Tensor]:
    """Figures of one degree, and the first step's velocity (1, *latent) float32 on the CPU."""
    torch._dynamo.reset()
    if degree > 1:
        sequence_parallel.require_heads({"transformer": adapter.transformer.config.num_attention_heads}, degree)
        sequence_parallel.require_tokens(adapter, options.size, degree)
        mesh = sequence_parallel.meet(store, rank, degree, adapter.device, WAIT)
        sequence_parallel.split(adapter.experts, mesh, adapter.device)
    try:
        if not options.eager:
            acceleration.compile_blocks(adapter.experts)
        return _steps(adapter, options, degree)
    finally:
        if degree > 1:
            sequence_parallel.join(adapter.experts)
            dist.destroy_process_group()


@torch.no_grad()
def _steps(adapter: WanAdapter, options: argparse.Namespace, degree: int) -> tuple[dict[str, Any], Tensor]:
    size, schedule, step = options.size, adapter.schedule(options.schedule, options.size), reverse_step("sde")
    latents = adapter.initial_latents([0], size).to(adapter.device)
    prompts = adapter.blank_prompts(1, TEXT_TOKENS)
    prompts.embeds.copy_(torch.randn(prompts.embeds.shape, generator=torch.Generator().manual_seed(0)))
    began = time.perf_counter()
    _warm_up(adapter, latents, schedule.timesteps[0], prompts, size)
    warm_s = _since(adapter.device, began)
    forwards, whole, velocities = list[float](), list[float](), list[Tensor]()
    for number in range(options.steps):
        began = time.perf_counter()
        velocity = adapter.velocity(latents, schedule.timesteps[number], prompts, size=size)
        forwards.append(_since(adapter.device, began))
        result = step(
            latents,
            velocity,
            schedule.sigmas[number].item(),
            schedule.sigmas[number + 1].item(),
            eta=0.7,
            sigma_max=schedule.sigma_max,
            noise=adapter.step_noise([0], number, latents.shape[1:]).to(adapter.device),
        )
        latents = result.prev_sample
        whole.append(_since(adapter.device, began))
        velocities.append(velocity)
    figures = {
        "forward_s": statistics.median(forwards),
        "step_s": statistics.median(whole),
        "forward_s_each": [round(seconds, 4) for seconds in forwards],
        "warm_up_s": round(warm_s, 1),
        "peak_gib": round(devices.peak_memory_bytes(adapter.device) / 2**30, 1),
        "finite": bool(latents.isfinite().all()),
    }
    return figures, velocities[0].cpu()


def _warm_up(adapter: WanAdapter, latents: Tensor, timestep: Tensor, prompts: Any, size: Size) -> None:
    """Compiles: a forward of two blocks, whose code all others share."""
    blocks = adapter.transformer.blocks
    adapter.transformer.blocks = blocks[:2]
    try:
        adapter.velocity(latents, timestep, prompts, size=size)
    finally:
        adapter.transformer.blocks = blocks


def report(options: argparse.Namespace, adapter: WanAdapter, results: Path) -> None:
    measured = {degree: json.loads((results / f"figures-{degree}").read_text()) for degree in options.degrees}
    velocities = {degree: _velocity(results, degree) for degree in options.degrees}
    base = options.degrees[0]
    for degree, figures in measured.items():
        figures["speed_up"] = round(measured[base]["forward_s"] / figures["forward_s"], 3)
        figures["step_speed_up"] = round(measured[base]["step_s"] / figures["step_s"], 3)
        figures |= differences(velocities[base], velocities[degree])
    print("| GPUs | s a forward | s a step | speed-up | largest difference | rms difference | GiB |")
    print("|---|---|---|---|---|---|---|")
    for degree, row in measured.items():
        print(
            f"| {degree} | {row['forward_s']:.3f} | {row['step_s']:.3f} | {row['speed_up']:.2f} | "
            f"{row['largest_difference']:.1e} | {row['rms_difference']:.1e} | {row['peak_gib']:.1f} |"
        )
    size = options.size
    settings = {
        "pixels": [size.num_frames, size.height, size.width],
        "tokens": sequence_parallel.num_tokens(adapter, size),
        "compile": not options.eager,
        "dtype": options.dtype,
        "device": adapter.device.type,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }
    print(json.dumps({"bench": "parallel", **settings, "degrees": measured}), flush=True)


def differences(one: Tensor, other: Tensor) -> dict[str, float]:
    """How far another result is from one."""
    gap = (other - one).double()
    largest, rms = gap.abs().max() / one.abs().max(), gap.square().mean().sqrt() / one.double().square().mean().sqrt()
    return {"largest_difference": float(largest), "rms_difference": float(rms)}


def _velocity(results: Path, degree: int) -> Tensor:
    return torch.frombuffer(bytearray((results / f"velocity-{degree}").read_bytes()), dtype=torch.float32)


def _since(device: torch.device, began: float) -> float:
    devices.synchronize(device)
    return time.perf_counter() - began


def _store(world: int) -> Any:
    """What all ranks share: torch's default group is another one in each phase."""
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
    return TCPStore(host, port, world, is_master=world == 1, timeout=WAIT)


def _meet(store: Any, name: str, world: int) -> None:
    """Waits for all ranks."""
    if store.add(name, 1) == world:
        store.set(f"{name}-all", "1")
    store.wait([f"{name}-all"])


def _options() -> argparse.Namespace:
    flags = argparse.ArgumentParser(
        prog="python -m bench.speed.parallel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--degrees", type=lambda text: [*map(int, text.split(","))], help="GPUs of a sample (1,2,4)")
    flags.add_argument("--steps", type=int, default=3, help="measured steps (3)")
    flags.add_argument("--schedule", type=int, default=40, help="steps of the whole schedule (40)")
    flags.add_argument("--frames", type=int, default=81)
    flags.add_argument("--height", type=int, default=720)
    flags.add_argument("--width", type=int, default=1280)
    flags.add_argument("--dtype", default="bfloat16")
    flags.add_argument("--eager", action="store_true", help="compile nothing")
    flags.add_argument("--tiny", action="store_true", help="a tiny model in float32 and 9 frames of 64 by 64 pixels")
    options = flags.parse_args()
    if options.tiny:
        options.frames, options.height, options.width, options.dtype = 9, 64, 64, "float32"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    options.degrees = options.degrees or [degree for degree in (1, 2, 4) if degree <= world]
    options.size = Size(options.height, options.width, options.frames)
    return options


if __name__ == "__main__":
    main()
