"""A job in one process: what is trained on, at a tiny size."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from flowfleet.job.spec import JobSpec, parse_job
from recipes.full_size.make_model import PROMPTS, write_checkpoint
from services.reward.scorer import Problem, Score
from tests import monolith
from tests.monolith import Monolith, Overlap

REWARDS = [0.1, 0.4, 0.2, 0.9]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    model = write_checkpoint(tmp_path_factory.mktemp("model"), tiny=True)
    job: dict[str, Any] = {
        "name": "one-process",
        "model": {"path": str(model), "dtype": "float32", "load_format": "dummy"},
        "data": {"train": str(model / PROMPTS)},
        "rollout": {
            "prompts_per_step": 2,
            "group_size": 4,
            "num_inference_steps": 4,
            "guidance_scale": 1.0,
            "batch_size": 4,
            "height": 64,
            "width": 64,
            "noise": {"type": "sde", "eta": 1.2},
            "window": {"strategy": "random", "size": 1, "low": 0, "high": 2},
        },
        "rewards": {"ocr": {"params": {"region": "page"}}},
        "algorithm": {"name": "flow_grpo", "clip_range": 1e-5},
        "trainer": {"mode": "lora", "micro_batch_size": 4, "optimizer": {"lr": 1e-3}},
        "schedule": {"steps": 1, "save_every": 1},
    }
    return parse_job(job)


@contextmanager
def started(spec: JobSpec) -> Iterator[Monolith]:
    assert spec.data.train is not None
    one = Monolith(spec, Path(spec.data.train).read_text().splitlines(), torch.get_num_threads())
    try:
        yield one
    finally:
        one.engine.ranks.close()


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without processes that read pictures: rewards are given."""
    monkeypatch.setenv("FLOWFLEET_DEVICE", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(monolith, "_evaluator", lambda *_: None)


def trained(spec: JobSpec, rewards: list[float | None]) -> dict[str, torch.Tensor]:
    """The adapter after a step with these rewards of the samples that come last."""
    with started(spec) as one:
        made = list(one.sample(0))
        one.train(0, made[-len(rewards) // 4 :], rewards)
        return {name: value.clone() for name, value in one.engine.full_tensors()}


def test_samples_without_a_score_are_left_out(spec: JobSpec) -> None:
    """Such samples count as not sampled, not as scored 0."""
    left, whole, zeros = (trained(spec, [*more, *REWARDS]) for more in ([None] * 4, [], [0.0] * 4))
    assert all(torch.equal(left[name], whole[name]) for name in whole)
    assert not all(torch.equal(zeros[name], whole[name]) for name in whole)


def test_a_problem_is_no_score(spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(spec) as one:
        batch = next(one.sample(0))
        outcomes = [Problem("undecodable", "no picture"), *(Score(reward) for reward in REWARDS[1:])]
        monkeypatch.setattr(one, "_evaluate", lambda samples, params: outcomes[: len(samples)])
        assert one.score(0, batch).result() == [None, *REWARDS[1:]]
        with pytest.raises(ValueError, match="step 0: no sample has a score"):
            one.train(0, [batch], [None] * 4)


class Recorded:
    """Stands in for a job in one process: two batches a step, and no work."""

    def __init__(self, num_steps: int) -> None:
        self.last = num_steps - 1
        self.version = -1
        self.sampled_at: dict[int, int] = {}
        self.is_ahead = threading.Event()

    def sample(self, step: int) -> Iterator[int]:
        for number in range(2):
            self.sampled_at.setdefault(step, max(0, self.version))
            if step > self.last:
                self.is_ahead.set()
            yield number

    def score(self, step: int, batch: int) -> Future[list[float]]:
        done = Future[list[float]]()
        done.set_result([1.0])
        return done

    def train(self, step: int, made: list[int], rewards: list[float]) -> dict[str, float]:
        assert len(made) == len(rewards) == 2
        if step == self.last:
            assert self.is_ahead.wait(30), "nothing is sampled during the last step"
        return {"update_actor": 1.0}

    def publish(self) -> None:
        self.version += 1 if self.version >= 0 else 2


def test_every_step_is_trained_beside_the_sampling_of_the_next() -> None:
    """The last one too; each step is sampled with weights at most one version old."""
    recorded, told = Recorded(4), list[int]()
    rows = Overlap(cast(Monolith, recorded)).run(4, lambda step, seconds: told.append(step))
    assert told == [0, 1, 2, 3]
    assert [row["timing_s/update_actor"] for row in rows] == [1.0] * 4
    assert all(row["timing_s/step"] > 0 for row in rows)
    assert recorded.sampled_at[1] == 1, "the first step compiles, with nothing next to it"
    assert all(version >= step - 1 for step, version in recorded.sampled_at.items())


def test_a_failure_ends_the_sampling_too(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(4)
    monkeypatch.setattr(recorded, "train", lambda step, made, rewards: {"update_actor": 1 / (1 - step)})
    with pytest.raises(ZeroDivisionError):
        Overlap(cast(Monolith, recorded)).run(4)
