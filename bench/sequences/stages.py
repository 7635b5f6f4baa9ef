"""The stages of `bench.sequences`, each alone in its process. The second reads what the first left in `--work`."""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench.gap import agreement
from flowfleet.algorithms.losses import limits
from flowfleet.data.blobs import FsspecBlobs
from flowfleet.data.sequences import PromptBlob, TokenTrajectory
from flowfleet.hardware import devices
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.models.sequences.adapter import SequenceAdapter, Tokens
from flowfleet.models.sequences.prompts import PromptMedia
from flowfleet.models.settings import Size
from flowfleet.proto import trainer_pb2
from flowfleet.proto.common_pb2 import PURPOSE_TRAIN, Sample, SampleId
from flowfleet.redis import keys
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
RANK: Final = 32
"""Rank of the LoRA."""
REQUEST: Final = "request.bin"
FROZEN: Final = 1e-12
"""Learning rate that moves nothing, so that every step's gap is that of one policy."""
WARM_UP_TOKENS: Final = 8
_WORDS: Final = ("what", "which", "color", "is", "the", "square", "sound", "in", "film")
_AROUND: Final = 9
"""Tokens of a prompt that are neither words nor picture."""
_GIB = 2**30


def rollout(options: argparse.Namespace) -> dict[str, Any]:
    """Measures requests of `rows` sequences, with the adapter that the trainer starts from."""
    return asyncio.run(_rollout(options))


async def _rollout(options: argparse.Namespace) -> dict[str, Any]:
    spec = job(options)
    engine = engine_of(options)
    try:
        start = time.perf_counter()
        await engine.prepare(model_spec(spec), lora_spec(spec))
        loaded = time.perf_counter() - start
        small = argparse.Namespace(**vars(options) | {"rows": options.group})
        await drawn(engine, small, WARM_UP_TOKENS)
        rates, seconds = list[float](), list[dict[str, float]]()
        for _ in range(options.steps):
            start = time.perf_counter()
            batches = await drawn(engine, options, options.tokens)
            tokens = sum(sample.num_tokens for batch in batches for sample in batch.samples)
            rates.append(tokens / (time.perf_counter() - start))
            parts = ("decode", "log_probs")  # vLLM's log-probs come with its tokens.
            seconds.append({name: sum(batch.seconds.get(name, 0.0) for batch in batches) for name in parts})
        store(options, batches)
        decode, log_probs = (statistics.median(each[name] for each in seconds) for name in ("decode", "log_probs"))
        return {
            "load_s": round(loaded, 1),
            "tokens_per_s": round(statistics.median(rates), 1),
            "decode_tokens_per_s": round(tokens / decode, 1),
            "decode_s": round(decode, 2),
            "log_probs_s": round(log_probs, 2),
            "tokens": tokens,
            "peak_gib": _peak(),
        }
    finally:
        await engine.close()


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Measures steps on what the stage rollout left, by the trainer's own metrics."""
    spec = job(options)
    start = time.perf_counter()
    worker = configured(spec, options)
    devices.synchronize(worker.ranks.device)
    loaded = time.perf_counter() - start
    request = trainer_pb2.TrainStepRequest.FromString((options.work / REQUEST).read_bytes())
    rows = [dict(worker.train(of_step(request, step)).metrics) for step in range(1 + options.steps)]
    measured = rows[1:]
    inputs = sum(item.sample.prompt_tokens + item.sample.num_tokens - 1 for item in request.samples)

    def median(name: str) -> float | None:
        values = [row[name] for row in measured if name in row]
        return statistics.median(values) if values else None

    update, old = median("timing_s/update_actor") or 0.0, median("timing_s/old_log_prob") or 0.0
    return {
        "load_s": round(loaded, 1),
        "first_step_s": round(rows[0]["timing_s/update_actor"], 2),
        "update_s": round(update, 3),
        "old_log_prob_s": round(old, 3),
        "tokens_per_s": round(inputs / update, 1),
        "mfu": median("perf/mfu/actor"),
        "peak_gib": _peak(),
        "gap": gaps(worker, spec, request, options),
    }


@torch.no_grad()
def gaps(
    worker: Worker, spec: JobSpec, request: trainer_pb2.TrainStepRequest, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Gaps of a sequence's mean log-prob between trainer and rollout, with the rollout's experts and with the model's
    own. `rerouted` is the share of tokens for which the trainer's router would choose other experts than the rollout's
    in any layer, `rerouted_choices` that of tokens and layers."""
    assert worker.job is not None
    adapter: SequenceAdapter = worker.job.engine.adapter
    sequences, stored = read(options, request)
    lengths = [item.num_inputs for item in sequences]
    packs = pack(range(len(sequences)), lengths, spec.trainer.micro_batch_tokens)
    bare = [replace(item, routed_experts=None) for item in sequences]
    found = {}
    for name, items in (("replayed", sequences), ("recomputed", bare)):
        means, tokens, changed = [], [], []
        for part in packs:
            with adapter.routing.recording() as chosen:
                values = adapter.log_probs([items[row] for row in part], temperature=1.0).cpu().double()
            own_experts = torch.stack([torch.cat(layer) for layer in chosen], dim=1).cpu()
            changed.append(differing(own_experts, [sequences[row].routed_experts for row in part]))
            for row, own in zip(part, torch.split(values, [len(items[row].token_ids) for row in part]), strict=True):
                gap = own - stored[row].double()
                means.append(gap.mean())
                tokens.append(gap.abs())
        found[name] = agreement(torch.stack(means), limits(spec.algorithm, 1)) | {
            "token_mean": float(torch.cat(tokens).mean()),
            "rerouted": float(torch.cat(changed).any(dim=1).double().mean()),
            "rerouted_choices": float(torch.cat(changed).double().mean()),
        }
    return found


def differing(chosen: torch.Tensor, recorded: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """(tokens, layers) bool: whether a token takes other experts in a layer, in any order, than were recorded. `chosen`
    is (tokens, layers, top_k)."""
    before = torch.cat([experts for experts in recorded if experts is not None]).to(chosen.dtype)
    return (chosen.sort(dim=-1).values != before.sort(dim=-1).values).any(dim=-1)


def engine_of(options: argparse.Namespace) -> RolloutEngine:
    """The engine of `--engine`."""
    if options.engine == "vllm":
        from services.rollout.engines.vllm.engine import VllmEngine

        return VllmEngine(devices.pick_device(), max_batch=options.rows, memory=0.9)
    return TransformersEngine(devices.pick_device(), max_batch=options.rows)


# Jobs, requests and samples -------------------------------------------------------------------------------------------


def job(options: argparse.Namespace) -> JobSpec:
    """GSPO as published, with two updates a step."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return parse_job(
        {
            "model": {"path": str(options.work / "model"), "dtype": options.dtype, "load_format": "dummy"},
            "data": {"train": "unused.txt"},
            "rewards": {"exact_match": {}},
            "algorithm": {"name": "gspo"},
            "rollout": {
                "prompts_per_step": max(1, options.rows // options.group),
                "group_size": options.group,
                "sequence": {"max_tokens": options.tokens, "routed_experts": True},
            },
            "trainer": {
                "mode": "lora",
                "micro_batch_tokens": options.micro_batch_tokens,
                "updates_per_step": 2,
                "gradient_checkpointing": "full",
                "lora": {"rank": RANK, "alpha": 2.0 * RANK, "target_modules": targets},
                "optimizer": {"lr": FROZEN},
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
    return [batch async for batch in engine.generate(request, lambda: False)]


def store(options: argparse.Namespace, batches: list[GeneratedBatch]) -> None:
    """Blobs, and the request of a training step on them; every other sequence has a positive advantage."""
    files, request = blobs(options), trainer_pb2.TrainStepRequest(job_id=JOB)
    for batch in batches:
        prompts = {group: PromptBlob.of(prompt) for group, prompt in batch.embeds.items()}
        refs = {g: files.put(keys.blob(JOB, "embeds", 0, g), prompt.to_bytes()) for g, prompt in prompts.items()}
        for sample in batch.samples:
            record: Any = sample.record
            key = keys.blob(JOB, "trajectory", 0, sample.group, sample.index)
            made = Sample(
                id=SampleId(job_id=JOB, group=sample.group, index=sample.index),
                purpose=PURPOSE_TRAIN,
                seed=sample.seed,
                trajectory=files.put(key, record.to_bytes()),
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


def _peak() -> float:
    return round(float(devices.peak_memory_bytes(devices.pick_device())) / _GIB, 1)
