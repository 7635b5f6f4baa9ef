"""Requests and engines that several test files share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowfleet.algorithms.samplers import SamplerName
from flowfleet.data.trajectories import FinalLatents, Trajectory
from flowfleet.models.base import ModelAdapter
from flowfleet.models.settings import Guidance, Size
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from services.rollout.engines.base import GeneratedSample, GenerationRequest, Noise, PromptGroup, Record, Sampling
from services.rollout.engines.diffusers import DiffusersEngine

PROMPTS = ('A red sign that says "K7QX"', 'A blue sign that says "AB"')
SIZE = Size(32, 48)
LORA = LoraSpec(rank=4, alpha=8.0, target_modules=["to_q", "to_v", "img_mlp.net.2"])


@pytest.fixture(scope="session")
def model(tiny_qwen_image: Path) -> ModelSpec:
    return ModelSpec(path=str(tiny_qwen_image), dtype="float32")


@pytest.fixture(scope="module")
def engine() -> Iterator[DiffusersEngine]:
    engine = DiffusersEngine(torch.device("cpu"), max_batch=8, threads=1)
    yield engine
    engine._thread.shutdown()


def make_request(
    *,
    num_groups: int = 2,
    indices: tuple[int, ...] = (0, 1, 2),
    sde_steps: tuple[int, ...] = (1, 2),
    step_type: str = "sde",
    eta: float = 0.7,
    guidance_scale: float = 1.0,
    share_initial: bool = False,
    num_steps: int = 4,
    size: Size = SIZE,
    record: Record | None = None,
    sampler: SamplerName = "euler",
    tail_steps: int = 0,
) -> GenerationRequest:
    """Training samples, their steps kept if there is noise; sample i of group g has the seed 1000 g + i."""
    groups = tuple(
        PromptGroup(group, PROMPTS[group % 2], indices, tuple(1000 * group + index for index in indices), 77 + group)
        for group in range(num_groups)
    )
    return GenerationRequest(
        groups,
        Sampling(size, num_steps, Guidance(guidance_scale), " " if guidance_scale > 1 else "", sampler=sampler),
        Noise(step_type, eta, sde_steps, share_initial, tail_steps)
        if sde_steps
        else Noise(share_initial=share_initial),
        record or ("steps" if sde_steps else "none"),
    )


def path_of(sample: GeneratedSample) -> Trajectory:
    assert isinstance(sample.record, Trajectory)
    return sample.record


def final_of(sample: GeneratedSample) -> torch.Tensor:
    assert isinstance(sample.record, FinalLatents)
    return sample.record.latents


def adapter_of(engine: DiffusersEngine) -> ModelAdapter:
    """The engine's model, as the trainer would have one of its own."""
    assert engine._adapter is not None
    return engine._adapter


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Uses as many threads as the engine: a CPU's kernels split their sums by threads, so bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
