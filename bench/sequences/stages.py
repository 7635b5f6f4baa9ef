"""The stages of `bench.sequences.speed`, each alone in its process. What one leaves for the next lies in `--work`."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch

from flowfleet.algorithms.correction import agreement_metrics
from flowfleet.algorithms.losses import limits
from flowfleet.data.blobs import FsspecBlobs
from flowfleet.data.sequences import PromptBlob, TokenTrajectory
from flowfleet.errors import DataLoss
from flowfleet.hardware import devices
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.models.sequences.adapter import PromptMedia, SequenceAdapter, Tokens
from flowfleet.models.settings import Size
from flowfleet.process.telemetry import LOG_PROB_GAP
from flowfleet.proto import trainer_pb2
from flowfleet.proto.common_pb2 import PURPOSE_TRAIN, Sample, SampleId
from flowfleet.proto.rollout_pb2 import TransferGroup
from flowfleet.redis import keys
from flowfleet.weights import weights
from flowfleet.weights.transfer import TransferMember, TransferStore
from services.rollout.engines.base import (
    GeneratedBatch,
    GenerationRequest,
    Noise,
    PromptGroup,
    RolloutEngine,
    Sampling,
    SequenceSampling,
)
from services.rollout.engines.transformers import TransformersEngine
from services.trainer.model.engine import lora_spec, model_spec
from services.trainer.parallel.ranks import Ranks
from services.trainer.step.packing import pack
from services.trainer.worker import Worker

JOB: Final = "bench"
REQUEST: Final = "request.bin"
BESIDE_TRAINER: Final = 0.25
"""Share of the memory that an engine may fill next to a trainer of all weights."""
FROZEN: Final = 1e-12
"""Learning rate that moves nothing, so that every step's gap is that of one policy."""
WARM_UP_TOKENS: Final = 8
MIN_TOKENS: Final = 32
"""Tokens of a warm-up, and the fewest of a measured request, where more would not fit into the stage's share."""
_WORDS: Final = ("what", "which", "color", "is", "the", "square", "sound", "in", "film")
_AROUND: Final = 9
"""Tokens of a prompt that are neither words nor picture."""
_GIB = 2**30


def rollout(options: argparse.Namespace) -> dict[str, Any]:
    """Requests of `rows` sequences, with the adapter that the trainer starts from."""
    return asyncio.run(_rollout(options))


async def _rollout(options: argparse.Namespace) -> dict[str, Any]:
    spec, deadline = job(options, "model", "lora"), end_of(options)
    engine = engine_of(options)
    try:
        start = time.perf_counter()
        await engine.prepare(model_spec(spec), lora_spec(spec))
        loaded = time.perf_counter() - start
        small = argparse.Namespace(**vars(options) | {"rows": options.group})
        await drawn(engine, small, WARM_UP_TOKENS)
        (warm, *_) = await drawn(engine, small, WARM_UP_TOKENS)
        per_token = warm.seconds["decode"] / WARM_UP_TOKENS
        steps = int((deadline - time.monotonic()) / per_token) - 2 * options.rows
        options.tokens = min(options.tokens, max(MIN_TOKENS, steps))  # log-probs take a forward a sequence
        rates, seconds = list[float](), list[dict[str, float]]()
        while not rates or (len(rates) < options.steps and time.monotonic() + sum(seconds[-1].values()) < deadline):
            start = time.perf_counter()
            batches = await drawn(engine, options, options.tokens)
            tokens = sum(sample.num_tokens for batch in batches for sample in batch.samples)
            rates.append(tokens / (time.perf_counter() - start))
            parts = ("decode", "log_probs")  # vLLM's log-probs come with its tokens.
            seconds.append({name: sum(batch.seconds.get(name, 0.0) for batch in batches) for name in parts})
        store(options, batches, with_experts=True)
        decode, log_probs = (statistics.median(each[name] for each in seconds) for name in ("decode", "log_probs"))
        return {
            "load_s": round(loaded, 1),
            "requests": len(rates),
            "tokens_per_s": round(statistics.median(rates), 1),
            "decode_tokens_per_s": round(tokens / decode, 1),
            "decode_s": round(decode, 2),
            "log_probs_s": round(log_probs, 2),
            "tokens": tokens,
            "tokens_of_sequence": options.tokens,
            "peak_gib": _peak(),
        }
    finally:
        await engine.close()


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Steps on what the stage rollout left: figures of the trainer's own metrics."""
    spec, deadline = job(options, "model", "lora"), end_of(options)
    start = time.perf_counter()
    worker = configured(spec, options)
    devices.synchronize(worker.ranks.device)
    loaded = time.perf_counter() - start
    request = trainer_pb2.TrainStepRequest.FromString((options.work / REQUEST).read_bytes())
    rows, took = list[dict[str, float]](), 0.0
    while len(rows) < 2 or (len(rows) <= options.steps and time.monotonic() + 1.5 * took < deadline):
        began = time.monotonic()
        rows.append(dict(worker.train(of_step(request, len(rows))).metrics))
        took = time.monotonic() - began
    measured = rows[1:]
    inputs = sum(item.sample.prompt_tokens + item.sample.num_tokens - 1 for item in request.samples)
    written = sum(item.sample.num_tokens for item in request.samples)

    def median(name: str) -> float | None:
        values = [row[name] for row in measured if name in row]
        return statistics.median(values) if values else None

    update, old = median("timing_s/update_actor") or 0.0, median("timing_s/old_log_prob") or 0.0
    return {
        "load_s": round(loaded, 1),
        "steps": len(measured),
        "first_step_s": round(rows[0]["timing_s/update_actor"], 2),
        "update_s": round(update, 3),
        "old_log_prob_s": round(old, 3),
        "tokens_per_s": round(inputs / update, 1),
        "written_per_s": round(written / update, 1),
        "mfu": _rounded(median("perf/mfu/actor")),
        "mfu_infer": _rounded(median("perf/mfu/actor_infer")),
        "beyond_clip_in_training": _rounded(rows[0].get("rollout_corr/beyond_clip")),
        "peak_gib": _peak(),
        "gap": gaps(worker, spec, request, options),
    }


@torch.no_grad()
def gaps(
    worker: Worker, spec: JobSpec, request: trainer_pb2.TrainStepRequest, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """|trainer's - rollout's| mean log-prob of a sequence: packed, with the rollout's experts and with the model's own,
    and one sequence a forward. `rerouted` is the share of tokens for which the trainer's router would choose other
    experts than the rollout's in any layer, `rerouted_choices` that of tokens and layers."""
    assert worker.job is not None
    adapter: SequenceAdapter = worker.job.engine.adapter
    sequences, stored = read(options, request)
    lengths = [item.num_inputs for item in sequences]
    packs = pack(range(len(sequences)), lengths, spec.trainer.micro_batch_tokens)
    bare = [replace(item, routed_experts=None) for item in sequences]
    alone = [(row,) for row in range(min(len(sequences), 16))]
    found = {}
    for name, items, rows in (("replayed", sequences, packs), ("recomputed", bare, packs), ("alone", bare, alone)):
        means, tokens, changed = [], [], []
        for part in rows:
            with adapter.routing.recording() as chosen:
                values = adapter.log_probs([items[row] for row in part], temperature=1.0).cpu().double()
            own_experts = torch.stack([torch.cat(layer) for layer in chosen], dim=1).cpu()
            changed.append(differing(own_experts, [sequences[row].routed_experts for row in part]))
            for row, own in zip(part, torch.split(values, [len(items[row].token_ids) for row in part]), strict=True):
                gap = own - stored[row].double()
                means.append(gap.mean())
                tokens.append(gap.abs())
        metrics = agreement_metrics(torch.stack(means), limits(spec.algorithm, 1))
        found[name] = {
            "mean": metrics[LOG_PROB_GAP],
            "p99": metrics["rollout_corr/log_ratio_abs_p99"],
            "max": metrics["rollout_corr/log_ratio_abs_max"],
            "beyond_clip": metrics["rollout_corr/beyond_clip"],
            "exact": metrics["rollout_corr/exact"],
            "token_mean": float(torch.cat(tokens).mean()),
            "sequences": float(len(means)),
            "rerouted": float(torch.cat(changed).any(dim=1).double().mean()),
            "rerouted_choices": float(torch.cat(changed).double().mean()),
        }
    return found


def differing(chosen: torch.Tensor, recorded: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """(tokens, layers) bool: whether a token takes other experts in a layer, in any order, than were recorded. `chosen`
    is (tokens, layers, top_k)."""
    before = torch.cat([experts for experts in recorded if experts is not None]).to(chosen.dtype)
    return (chosen.sort(dim=-1).values != before.sort(dim=-1).values).any(dim=-1)


def publish(options: argparse.Namespace) -> dict[str, Any]:
    """All weights of a mixture: a step moves them, they are sent, the live ones are verified, and sampled with."""
    return asyncio.run(_publish(options))


async def _publish(options: argparse.Namespace) -> dict[str, Any]:
    options = argparse.Namespace(**vars(options) | {"rows": options.group, "tokens": min(options.tokens, 32)})
    spec = job(options, "full", "full")
    worker = await asyncio.to_thread(configured, spec, options)  # First: vLLM takes the process group that is there.
    engine = engine_of(options, memory=BESIDE_TRAINER)
    try:
        await engine.prepare(model_spec(spec), None)
        store(options, await drawn(engine, options, options.tokens), with_experts=False)
        request = trainer_pb2.TrainStepRequest.FromString((options.work / REQUEST).read_bytes())
        before = weights.digest(weights.tensor_hashes(live(engine)))
        await asyncio.to_thread(worker.train, of_step(request, 0))
        worker.member, receiver = await joined(worker.ranks.device)
        assert worker.job is not None
        buckets = worker.job.engine.gather().buckets
        start = time.perf_counter()
        wanted = trainer_pb2.PublishWeightsRequest(job_id=JOB, version=1)
        sent, _ = await asyncio.gather(
            asyncio.to_thread(worker.send_weights, wanted), engine.receive(receiver, buckets)
        )
        received = time.perf_counter() - start
        assert sent is not None
        start = time.perf_counter()
        digest = await engine.verify(sent.hashes)
        verified = time.perf_counter() - start
        after = await drawn(engine, options, options.tokens)
        return {
            "parameters": sum(tensor.numel() for _, tensor in live(engine)),
            "tensors": len(sent.hashes),
            "expert_bytes": sum(tensor.nbytes for name, tensor in live(engine) if ".experts." in name),
            "bytes": sent.bytes,
            "transfer_s": round(received, 2),
            "verify_s": round(verified, 3),
            "digest": digest,
            "is_verified": digest == sent.digest,
            "is_new": digest != before,
            "flipped_element_found": await torn(engine, sent.hashes),
            "exact_after": exactly(worker, after),
            "peak_gib": _peak(),
        }
    finally:
        await engine.close()


async def joined(device: torch.device) -> tuple[TransferMember, TransferMember]:
    """Both ends of a transfer group of this process, over Gloo: one device has no two ranks of a faster one."""
    meeting = TransferStore("127.0.0.1", 30.0)
    group = partial(
        TransferGroup,
        group_id="bench",
        backend="gloo",
        store_host=meeting.host,
        store_port=meeting.port,
        world_size=2,
        timeout_s=60.0,
    )
    sender, receiver = await asyncio.gather(
        asyncio.to_thread(TransferMember.join, group(rank=0), device, meeting),
        asyncio.to_thread(TransferMember.join, group(rank=1), device),
    )
    return sender, receiver


async def torn(engine: RolloutEngine, hashes: dict[str, int]) -> bool:
    """Whether one changed element of one expert is found."""
    name, tensor = next((name, tensor) for name, tensor in live(engine) if ".experts." in name)
    with torch.no_grad():
        tensor.view(-1)[7] += 1.0
    try:
        await engine.verify(hashes)
    except DataLoss as error:
        return name in str(error)
    return False


@torch.no_grad()
def exactly(worker: Worker, batches: list[GeneratedBatch]) -> float:
    """Share of the sequences whose log-probs are the trainer's bit for bit, one a forward."""
    assert worker.job is not None
    found = []
    for batch in batches:
        for sample in batch.samples:
            record: Any = sample.record
            tokens = Tokens(batch.embeds[sample.group], record.token_ids)
            own = worker.job.engine.adapter.log_probs([tokens], temperature=1.0)
            found.append(torch.equal(own.cpu(), record.log_probs))
    return sum(found) / len(found)


def engine_of(options: argparse.Namespace, memory: float = 0.9) -> RolloutEngine:
    """The engine of `--engine`; vLLM may fill `memory` of the device."""
    if options.engine == "vllm":
        from services.rollout.engines.vllm.engine import VllmEngine

        return VllmEngine(devices.pick_device(), max_batch=options.rows, memory=memory)
    return TransformersEngine(devices.pick_device(), max_batch=options.rows)


def live(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The engine's weights by published name."""
    yield from engine._live_weights().items()


# Jobs, requests and samples -------------------------------------------------------------------------------------------


def job(options: argparse.Namespace, folder: str, mode: str) -> JobSpec:
    """GSPO as published, with two updates a step."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return parse_job(
        {
            "model": {"path": str(options.work / folder), "dtype": options.dtype, "load_format": "dummy"},
            "data": {"train": "unused.txt"},
            "rewards": {"exact_match": {}},
            "algorithm": {"name": "gspo"},
            "rollout": {
                "prompts_per_step": max(1, options.rows // options.group),
                "group_size": options.group,
                "sequence": {"max_tokens": options.tokens, "routed_experts": mode == "lora"},
            },
            "trainer": {
                "mode": mode,
                "micro_batch_tokens": options.micro_batch_tokens,
                "updates_per_step": 2 if mode == "lora" else 1,
                "gradient_checkpointing": options.checkpointing,
                "lora": {"rank": options.rank, "alpha": 2.0 * options.rank, "target_modules": targets},
                "optimizer": {"lr": FROZEN if mode == "lora" else 1e-4},
            },
        }
    )


def configured(spec: JobSpec, options: argparse.Namespace) -> Worker:
    """The trainer's worker, a world of one."""
    worker = Worker(Ranks(), blobs(options))
    directory = str(options.work / "checkpoints")
    worker.configure(trainer_pb2.ConfigureRequest(job_id=JOB, spec_json=spec.model_dump_json(), directory=directory))
    return worker


async def drawn(engine: RolloutEngine, options: argparse.Namespace, num_tokens: int) -> list[GeneratedBatch]:
    """A request of groups whose prompts are different words and pictures, but equally long."""
    draw = np.random.default_rng(0)
    patch = options.pixels // (16 if options.tiny else 32)
    words = options.prompt - patch**2 - _AROUND
    groups = []
    for number in range(max(1, options.rows // options.group)):
        shown = draw.integers(0, 255, (options.pixels, options.pixels, 3), np.uint8)
        prompt = " ".join(draw.choice(_WORDS, max(1, words)))
        indices = tuple(range(options.group))
        seeds = tuple(1000 * number + index for index in indices)
        groups.append(PromptGroup(number, prompt, indices, seeds, inputs=(PromptMedia("picture", shown),)))
    sequence = SequenceSampling(max_tokens=num_tokens, routed_experts=True)
    request = GenerationRequest(tuple(groups), Sampling(Size(16, 16), 1), Noise(), "tokens", sequence=sequence)
    return [batch async for batch in engine.generate(request, _never)]


_never: Callable[[], bool] = lambda: False  # noqa: E731


def store(options: argparse.Namespace, batches: list[GeneratedBatch], *, with_experts: bool) -> None:
    """Blobs, and the request of a training step on them; every other sequence has a positive advantage."""
    files, request = blobs(options), trainer_pb2.TrainStepRequest(job_id=JOB)
    for batch in batches:
        prompts = {group: PromptBlob.of(prompt) for group, prompt in batch.embeds.items()}
        refs = {g: files.put(keys.blob(JOB, "embeds", 0, g), prompt.to_bytes()) for g, prompt in prompts.items()}
        for sample in batch.samples:
            record: Any = sample.record
            written = record if with_experts else replace(record, routed_experts=None)
            key = keys.blob(JOB, "trajectory", 0, sample.group, sample.index)
            made = Sample(
                id=SampleId(job_id=JOB, group=sample.group, index=sample.index),
                purpose=PURPOSE_TRAIN,
                seed=sample.seed,
                trajectory=files.put(key, written.to_bytes()),
                prompt_embeds=refs[sample.group],
                num_tokens=sample.num_tokens,
                prompt_tokens=sample.prompt_tokens,
                stop_reason=sample.stop_reason,
            )
            advantage = 1.0 if sample.index % 2 else -1.0
            request.samples.append(trainer_pb2.TrainSample(sample=made, advantage=advantage, reward=0.5))
    (options.work / REQUEST).write_bytes(request.SerializeToString())


def of_step(request: trainer_pb2.TrainStepRequest, step: int) -> trainer_pb2.TrainStepRequest:
    """The same samples for another step."""
    copy = trainer_pb2.TrainStepRequest.FromString(request.SerializeToString())
    copy.step = step
    for item in copy.samples:
        item.sample.id.step = step
    return copy


def read(options: argparse.Namespace, request: trainer_pb2.TrainStepRequest) -> tuple[list[Tokens], list[torch.Tensor]]:
    """Sequences as the trainer takes them, and the rollout's log-probs."""
    files, sequences, stored = blobs(options), [], []
    for item in request.samples:
        prompt = PromptBlob.from_bytes(files.get(item.sample.prompt_embeds)).encoded()
        written = TokenTrajectory.from_bytes(files.get(item.sample.trajectory))
        sequences.append(Tokens(prompt, written.token_ids, written.routed_experts))
        stored.append(written.log_probs)
    return sequences, stored


def blobs(options: argparse.Namespace) -> FsspecBlobs:
    """Files below `--work`."""
    folder: Path = options.work / "blobs"
    return FsspecBlobs(f"file://{folder}")


def end_of(options: argparse.Namespace) -> float:
    """When the stage has used its share, on the monotonic clock; it began with this process."""
    began: float = psutil.Process().create_time()
    limit: float = options.stage_s
    return time.monotonic() + limit - (time.time() - began)


def _peak() -> float:
    return round(float(devices.peak_memory_bytes(devices.pick_device())) / _GIB, 1)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
