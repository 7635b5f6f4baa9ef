"""Measures how many images per second one rollout replica makes, as a service and as bare diffusers.

    python -m bench.rollout [--model DIRECTORY] [--engine diffusers|vllm-omni] [--compile] [--quantization fp8|fp8_base]
        [--guidance 4] [--images 192] [--batch 16] [--lora-rank 64] [--rows service,bare]
    python -m bench.rollout --weights /dev/shm --lora-rank 16 --rows service --images 1 --batch 1 --warm-up 1 [--peer]
    python -m bench.rollout --tiny --images 4 --batch 2 --warm-up 1

`service` is the replica's process behind gRPC, Redis and blobs, fed as the controller feeds it: two calls at a time of
`--batch` samples each, whose steps are recorded. Its figure includes the text encoder, the VAE and storing. `bare` is
diffusers' QwenImagePipeline, eager, with the same batch; it stores nothing. The model is Qwen-Image at full size with
random weights. Without `--lora-rank` the adapter that makes the replica serve has rank 1 on one linear.

`start_s` is the time from the process's start until it listens, `load_s` that of the first update, until it serves.
`--weights` has it load files in that folder, and `--peer` take them from another replica, which needs their room again.

Images per second are the median over calls after `--warm-up`: images of a call over the time since the previous call
ended.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.replica import JOB, Replica, exposition, gauge, lora_spec, publish_adapter, running, seconds_by_part
from flowfleet.data.blobs import open_blobs
from flowfleet.hardware import devices
from flowfleet.models.registry import family_of
from flowfleet.proto import common_pb2, rollout_pb2, rollout_pb2_grpc
from flowfleet.redis.client import connect
from flowfleet.rpc.endpoint import open_channel
from flowfleet.weights.weights import dtype_of
from recipes.full_size.make_model import PROMPTS, write_checkpoint
from services.rollout.engines.acceleration import QUANTIZATIONS

CALL_S = 1800.0
"""Longest wait for one call: the first ones compile."""
OUTSTANDING = 2
ONE_LINEAR = "transformer_blocks.0.attn.to_q"


@dataclass
class Calls:
    """Results of the calls, in the order in which they ended."""

    ended: list[float] = field(default_factory=list)
    samples: list[list[common_pb2.Sample]] = field(default_factory=list)
    expositions: list[str] = field(default_factory=list)


def main() -> int:
    options = parser().parse_args()
    if options.tiny:
        options.steps, options.size, options.dtype = min(options.steps, 3), 64, "float32"
    with tempfile.TemporaryDirectory(prefix="bench-rollout-", dir=options.weights) as scratch:
        options.scratch = Path(scratch) / "copies"
        if options.model is None:
            options.model = write_checkpoint(Path(scratch) / "model", tiny=options.tiny)
            if options.weights is not None:
                report.in_child(write_weights, options)
        rows = [measure(row, options) for row in options.rows.split(",")]
    columns = ["row", "images_per_s", "forward_ms_per_image", "peak_gib", "start_s", "load_s"]
    report.finish("rollout", options, rows, columns)
    return 0


def measure(row: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns a row, its settings and figures. Raises ValueError for an unknown one."""
    if row == "service":
        figures = asyncio.run(as_service(options))
    elif row == "bare":
        figures = report.in_child(run_bare, options, num_calls(options))
    else:
        raise ValueError(f"--rows {row}: give service, bare or both")
    names = ["guidance", "batch", "steps", "size"]
    if row == "service":
        names += ["engine", "compile", "quantization", "lora_rank"]
    return {"bench": "rollout", "row": row, **{name: getattr(options, name) for name in names}, **figures}


# Bare diffusers ------------------------------------------------------------------------------------------------------


def run_bare(options: argparse.Namespace, num_calls: int) -> dict[str, Any]:
    """Measures calls of one prompt and `batch` pictures of it; the first `warm_up` are left out."""
    device = devices.pick_device() if options.device == "auto" else torch.device(options.device)
    load = family_of(options.model).load().load
    adapter = load(options.model, dtype=dtype_of(options.dtype), device=device, load_format="dummy")
    pipeline: Any = adapter.pipeline
    pipeline.set_progress_bar_config(disable=True)
    prompts = (options.model / PROMPTS).read_text().splitlines()
    guided = {"true_cfg_scale": options.guidance, "negative_prompt": " "} if options.guidance > 1 else {}
    ended = [time.perf_counter()]
    for number in range(num_calls):
        made = pipeline(
            prompt=prompts[number % len(prompts)],
            num_images_per_prompt=options.batch,
            num_inference_steps=options.steps,
            height=options.size,
            width=options.size,
            **(guided or {"true_cfg_scale": 1.0}),
        )
        assert len(made.images) == options.batch
        ended.append(time.perf_counter())
    gaps = [after - before for before, after in pairwise(ended[options.warm_up :])]
    rates = [options.batch / seconds for seconds in gaps]
    return {
        "images_per_s": statistics.median(rates),
        "images_per_s_each": [round(rate, 3) for rate in rates],
        "peak_gib": devices.peak_memory_bytes(device) / 2**30,
    }


# As a service --------------------------------------------------------------------------------------------------------


async def as_service(options: argparse.Namespace) -> dict[str, Any]:
    adapter = lora_spec(options.model, options.lora_rank or 1)
    if not options.lora_rank:
        adapter.target_modules[:] = [ONE_LINEAR]
    flags = ["--engine", options.engine, "--device", options.device, "--max-batch", str(options.batch)]
    async with AsyncExitStack() as stack:
        redis_url = ""
        for name in ("peer", "measured") if options.peer else ("measured",):
            before = time.monotonic()
            own = ["--replica-id", name, "--model-copies", str(options.scratch)]
            replica = stack.enter_context(running(*flags, *own, redis_url=redis_url))
            redis_url, start_s = replica.redis_url, time.monotonic() - before
            channel = await stack.enter_async_context(open_channel(replica.address))
            client = await stack.enter_async_context(connect(redis_url))
            stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
            load_s = await publish_adapter(stub, open_blobs(client), model_spec(options), adapter)
        calls = await feed(stub, replica, requests(options))
    return {**figures_of(options, calls), "start_s": round(start_s, 1), "load_s": round(load_s, 1)}


async def feed(stub: Any, replica: Replica, waiting: list[rollout_pb2.GenerateRequest]) -> Calls:
    """Keeps two calls outstanding until all are answered."""
    calls = Calls()

    async def worker() -> None:
        while waiting:
            request = waiting.pop(0)
            samples = [event.sample async for event in stub.Generate(request, timeout=CALL_S)]
            calls.ended.append(time.perf_counter())
            calls.samples.append(samples)
            calls.expositions.append(await asyncio.to_thread(exposition, replica.metrics_url))

    async with asyncio.TaskGroup() as group:
        for _ in range(OUTSTANDING):
            group.create_task(worker())
    return calls


def requests(options: argparse.Namespace) -> list[rollout_pb2.GenerateRequest]:
    """Returns a request per call, warm-up included: `batch` samples of one prompt, two noisy steps recorded."""
    prompts = (options.model / PROMPTS).read_text().splitlines()
    sampling = rollout_pb2.Sampling(
        height=options.size,
        width=options.size,
        num_inference_steps=options.steps,
        guidance_scale=options.guidance,
        negative_prompt=" " if options.guidance > 1 else "",
    )
    found = []
    for number in range(num_calls(options)):
        group = rollout_pb2.PromptGroup(
            group=number,
            prompt=prompts[number % len(prompts)],
            indices=range(options.batch),
            seeds=range(number * options.batch, (number + 1) * options.batch),
        )
        one = rollout_pb2.GenerateRequest(job_id=JOB, purpose=common_pb2.PURPOSE_TRAIN, sampling=sampling)
        one.noise.CopyFrom(rollout_pb2.Noise(step_type="sde", eta=1.2, sde_steps=[0, 1]))
        one.groups.append(group)
        one.record = common_pb2.RECORD_STEPS
        found.append(one)
    return found


def num_calls(options: argparse.Namespace) -> int:
    """At least two measured ones."""
    return int(options.warm_up + max(2, options.images // options.batch))


def figures_of(options: argparse.Namespace, calls: Calls) -> dict[str, Any]:
    first = options.warm_up - 1
    times = calls.ended[first:]
    gaps = [after - before for before, after in pairwise(times)]
    rates = [len(samples) / gap for samples, gap in zip(calls.samples[first + 1 :], gaps, strict=True)]
    before, after = (seconds_by_part(calls.expositions[place]) for place in (first, -1))
    spent, wall = {part: after[part] - before.get(part, 0.0) for part in after}, times[-1] - times[0]
    images = sum(map(len, calls.samples[first + 1 :]))
    forwards = images * options.steps * (2 if options.guidance > 1 else 1)
    return {
        "images_per_s": statistics.median(rates),
        "images_per_s_each": [round(rate, 3) for rate in rates],
        "share": {part: round(value / wall, 4) for part, value in spent.items()},
        "forward_ms_per_image": 1000 * spent["denoise"] / forwards,
        "peak_gib": gauge(calls.expositions[-1], "flowfleet_rollout_peak_memory_gib"),
    }


def model_spec(options: argparse.Namespace) -> rollout_pb2.ModelSpec:
    return rollout_pb2.ModelSpec(
        path=str(options.model.resolve()),
        dtype=options.dtype,
        load_format="dummy" if options.weights is None else "",
        compile=options.compile,
        quantization="" if options.quantization == "none" else options.quantization,
    )


def write_weights(options: argparse.Namespace) -> None:
    """Random weights, into the folder of the configurations."""
    device, dtype = devices.pick_device(), dtype_of(options.dtype)
    adapter = family_of(options.model).load().load(options.model, dtype=dtype, device=device, load_format="dummy")
    adapter.pipeline.save_pretrained(options.model)


def parser() -> argparse.ArgumentParser:
    flags = report.parser("rollout", __doc__)
    flags.add_argument("--model", type=Path, help="a folder of recipes.full_size.make_model (made)")
    flags.add_argument("--weights", type=Path, help="folder for files with random weights, such as /dev/shm")
    flags.add_argument("--peer", action="store_true", help="take them from another replica")
    flags.add_argument("--tiny", action="store_true", help="tiny model, 64 by 64 pixels, 3 steps, float32")
    flags.add_argument("--rows", default="bare,service")
    flags.add_argument("--engine", choices=("diffusers", "vllm-omni"), default="diffusers")
    flags.add_argument("--device", default="auto")
    flags.add_argument("--dtype", default="bfloat16")
    flags.add_argument("--compile", action="store_true")
    flags.add_argument("--quantization", choices=QUANTIZATIONS, default="none")
    flags.add_argument("--guidance", type=float, default=1.0)
    flags.add_argument("--images", type=int, default=192, help="measured (192)")
    flags.add_argument("--batch", type=int, default=16, help="samples of a call and of a forward (16)")
    flags.add_argument("--warm-up", type=int, default=3, help="calls before the measured ones (3)")
    flags.add_argument("--steps", type=int, default=10)
    flags.add_argument("--size", type=int, default=512, help="height and width (512)")
    flags.add_argument("--lora-rank", type=int, default=0, help="adapt all of the family's linears with this rank")
    return flags


if __name__ == "__main__":
    sys.exit(main())
