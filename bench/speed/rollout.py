"""How many images a second does one replica make, as a service and as bare diffusers?

    python -m bench.speed.rollout --model DIRECTORY [--engine diffusers|vllm-omni] [--compile]
        [--quantization fp8|fp8_base] [--guidance 4] [--images 192] [--batch 16] [--lora-rank 64] [--ragged]
        [--rows service,bare]
    python -m bench.speed.rollout --tiny

`service`: the replica's process behind gRPC, Redis and blobs, fed as the controller feeds it: two calls at a time of
`--batch` samples each, whose steps are recorded. Prompt in, trajectory stored and PNG encoded: text encoder, VAE and
storing are in the figure. `bare`: diffusers' QwenImagePipeline, eager, the same batch, nothing stored. The model is the
one of `full_size` with random weights. One JSON line a row. Without `--lora-rank` the adapter that makes the
replica serve is of rank 1 on one linear alone.

Images a second are the median over calls after `--warm-up` of them: images of a call over the time since the call
before ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.speed.bare import run_bare
from bench.speed.full_size import PROMPTS, write_checkpoint
from bench.speed.replica import JOB, Replica, gauge, publish_adapter, seconds_by_part, started
from flowfleet.data.blobs import BlobStore, open_blobs
from flowfleet.data.trajectories import EmbedsBlob
from flowfleet.hardware import devices
from flowfleet.job.spec import parse_job
from flowfleet.models.registry import adapter_for
from flowfleet.planning.flops import model_flops
from flowfleet.proto import common_pb2, rollout_pb2, rollout_pb2_grpc
from flowfleet.redis.client import connect
from flowfleet.rpc.endpoint import open_channel
from services.rollout.engines.acceleration import QUANTIZATIONS

CALL_S = 1800.0
"""Longest wait for one call: the first ones compile."""
OUTSTANDING = 2
ONE_LINEAR = "transformer_blocks.0.attn.to_q"


@dataclass
class Calls:
    """What came of the calls, in the order in which they ended."""

    ended: list[float] = field(default_factory=list)
    samples: list[list[common_pb2.Sample]] = field(default_factory=list)
    expositions: list[str] = field(default_factory=list)


def main() -> int:
    options = parser().parse_args()
    if options.tiny:
        options.steps, options.size, options.dtype = min(options.steps, 3), 64, "float32"
    with tempfile.TemporaryDirectory(prefix="bench-rollout-") as scratch:
        if options.model is None:
            options.model = write_checkpoint(Path(scratch) / "model", tiny=options.tiny)
        for row in options.rows.split(","):
            print(json.dumps(measure(row, options)), flush=True)
    return 0


def measure(row: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row: its settings and figures. Raises ValueError for one that there is not."""
    if row == "service":
        figures = asyncio.run(as_service(options))
    elif row == "bare" and options.in_child:
        figures = run_bare(options, num_calls(options))
    elif row == "bare":
        return in_child(options)
    else:
        raise ValueError(f"--rows {row}: give service, bare or both")
    names = [
        "engine",
        "compile",
        "quantization",
        "guidance",
        "batch",
        "steps",
        "size",
        "lora_rank",
        "ragged",
        "adapter",
    ]
    settings = (
        {name: getattr(options, name) for name in names}
        if row == "service"
        else {name: getattr(options, name) for name in ("guidance", "batch", "steps", "size")}
    )
    return {"bench": "rollout", "row": row, **settings, **figures, "torch": torch.__version__}


def in_child(options: argparse.Namespace) -> dict[str, Any]:
    """The bare row in a process of its own, whose memory is free afterwards."""
    given = {"--model": options.model, "--guidance": options.guidance, "--batch": options.batch}
    given |= {"--images": options.images, "--warm-up": options.warm_up, "--steps": options.steps}
    given |= {"--size": options.size, "--dtype": options.dtype, "--device": options.device}
    argv = [sys.executable, "-m", "bench.speed.rollout", "--rows", "bare", "--in-child"]
    argv += [str(part) for pair in given.items() for part in pair]
    done = subprocess.run(argv, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout.decode().splitlines()[-1]))


# As a service --------------------------------------------------------------------------------------------------------


async def as_service(options: argparse.Namespace) -> dict[str, Any]:
    flags = ["--engine", options.engine, "--device", options.device, "--max-batch", str(options.batch)]
    with started(*flags) as replica:
        client = connect(replica.redis_url)
        channel = open_channel(replica.address)
        stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
        blobs = open_blobs(client)
        try:
            started_at = time.monotonic()
            await publish_adapter(stub, blobs, model_spec(options), lora_spec(options))
            loaded_s = time.monotonic() - started_at
            calls = await feed(stub, replica, requests(options))
            tokens = await text_tokens(blobs, calls)
        finally:
            await channel.close()
            await client.aclose()
    return {**figures_of(options, calls, tokens), "load_s": round(loaded_s, 1)}


async def feed(stub: Any, replica: Replica, waiting: list[rollout_pb2.GenerateRequest]) -> Calls:
    """Keeps two calls outstanding until all are answered."""
    calls = Calls()

    async def worker() -> None:
        while waiting:
            request = waiting.pop(0)
            samples = [event.sample async for event in stub.Generate(request, timeout=CALL_S)]
            calls.ended.append(time.perf_counter())
            calls.samples.append(samples)
            calls.expositions.append(await asyncio.to_thread(replica.exposition))

    async with asyncio.TaskGroup() as group:
        for _ in range(OUTSTANDING):
            group.create_task(worker())
    return calls


def requests(options: argparse.Namespace) -> list[rollout_pb2.GenerateRequest]:
    """One a call, warm-up included: `batch` samples of one prompt, two noisy steps recorded."""
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
        prompt = prompts[number % len(prompts)]
        if options.ragged:  # the fillers at a prompt's end are a token each
            prompt = prompt[: len(prompt) - (37 * number) % 64]
        group = rollout_pb2.PromptGroup(
            group=number,
            prompt=prompt,
            indices=range(options.batch),
            seeds=range(number * options.batch, (number + 1) * options.batch),
        )
        found.append(
            rollout_pb2.GenerateRequest(
                job_id=JOB,
                purpose=common_pb2.PURPOSE_TRAIN,
                sampling=sampling,
                noise=rollout_pb2.Noise(step_type="sde", eta=1.2, sde_steps=[0, 1]),
                groups=[group],
                record=common_pb2.RECORD_STEPS,
            )
        )
    return found


def num_calls(options: argparse.Namespace) -> int:
    """At least two measured ones."""
    return int(options.warm_up + max(2, options.images // options.batch))


def figures_of(options: argparse.Namespace, calls: Calls, tokens: tuple[float, float]) -> dict[str, Any]:
    """`tokens`: of prompts, the mean, and of the negative one (0 without guidance)."""
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
        "images_per_s_overall": images / wall,
        "images_per_s_each": [round(rate, 3) for rate in rates],
        "share": {part: round(value / wall, 4) for part, value in spent.items()},
        "forward_ms_per_image": 1000 * spent["denoise"] / forwards,
        "text_tokens": tokens[0],
        "mfu": mfu(options, statistics.median(rates), tokens),
        "peak_gib": gauge(calls.expositions[-1], "flowfleet_rollout_peak_memory_gib"),
    }


async def text_tokens(blobs: BlobStore, calls: Calls) -> tuple[float, float]:
    """Mean text tokens of the prompts, and those of the negative prompt, as the transformer saw them."""
    firsts = [samples[0] for samples in calls.samples]
    widths = [EmbedsBlob.from_bytes(await blobs.get(s.prompt_embeds)).row().embeds.shape[1] for s in firsts]
    negative = 0.0
    if firsts[0].HasField("negative_embeds"):
        negative = EmbedsBlob.from_bytes(await blobs.get(firsts[0].negative_embeds)).row().embeds.shape[1]
    return statistics.fmean(widths), negative


def mfu(options: argparse.Namespace, images_per_s: float, tokens: tuple[float, float]) -> float | None:
    """Model FLOPs of the transformer's forwards over the device's peak in bf16; None where that is unknown."""
    device = torch.device("cpu") if options.device == "cpu" else devices.pick_device()
    peak = devices.peak_flops(device)
    if peak is None:
        return None
    trainer = {"mode": "lora", "lora": {"rank": options.lora_rank}} if options.lora_rank else {"mode": "full"}
    rollout = {"height": options.size, "width": options.size, "num_inference_steps": options.steps}
    job: dict[str, Any] = {
        "model": {"path": str(options.model), "dtype": options.dtype, "load_format": "dummy"},
        "data": {"train": str(options.model / PROMPTS)},
        "rewards": {"ocr": {}},
        "rollout": rollout,
        "trainer": trainer,
    }
    flops = model_flops(parse_job(job))
    forward = flops.sampling(tokens[0]) + (flops.sampling(tokens[1]) if tokens[1] else 0.0)
    return float(images_per_s * options.steps * forward / peak)


def model_spec(options: argparse.Namespace) -> rollout_pb2.ModelSpec:
    return rollout_pb2.ModelSpec(
        path=str(options.model.resolve()),
        dtype=options.dtype,
        load_format="dummy",
        compile=options.compile,
        quantization="" if options.quantization == "none" else options.quantization,
    )


def lora_spec(options: argparse.Namespace) -> rollout_pb2.LoraSpec:
    if not options.lora_rank:
        return rollout_pb2.LoraSpec(rank=1, alpha=1.0, target_modules=[ONE_LINEAR])
    targets = adapter_for(options.model).lora_targets
    rank, merged = options.lora_rank, options.adapter == "merged"
    return rollout_pb2.LoraSpec(rank=rank, alpha=2.0 * rank, target_modules=targets, merged=merged)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="python -m bench.speed.rollout", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--model", type=Path, help="a folder of bench.speed.full_size (made)")
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
    flags.add_argument("--adapter", choices=("separate", "merged"), default="separate", help="rollout.adapter")
    flags.add_argument("--ragged", action="store_true", help="prompts of 65 to 128 tokens")
    flags.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    return flags


if __name__ == "__main__":
    sys.exit(main())
