"""`perf/mfu`: rows, forwards, time and peak put together, on a device that claims a peak."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from flowfleet.algorithms.settings import NoiseLevelSettings
from flowfleet.data.blobs import SyncBlobs
from flowfleet.hardware import devices
from flowfleet.job.spec import JobSpec
from flowfleet.planning.flops import ForwardFlops, ModelFlops
from flowfleet.planning.sequence_flops import sequence_flops
from services.trainer.parallel.ranks import Ranks
from services.trainer.step import mfu
from tests.services.trainer import sequences
from tests.services.trainer.steps import Drawer, make_spec
from tests.services.trainer.workers import engine_of, make_worker
from tests.tiny_models.text import save_text_model

PEAK, BASE, ADAPTED = 1e12, 1e9, 1.5e9


@pytest.mark.parametrize(
    ("parts", "forwards", "inferred"),
    [
        ({"trainer": {"updates_per_step": 1}}, 1, 0.0),
        ({"trainer": {"updates_per_step": 2, "deterministic": False}}, 1, 0.5),
        (
            {"trainer": {"updates_per_step": 2, "deterministic": False, "mode": "full"}, "algorithm": {"kl_coef": 0.1}},
            1,
            1.5,
        ),
        ({"trainer": {"updates_per_step": 1}, "algorithm": {"old_log_probs": "recompute"}}, 1, 1.0),
        ({"trainer": {"updates_per_step": 1}, "rollout": {"guidance_scale": 3.0}}, 2, 0.0),
        ({"algorithm": {"name": "diffusion_nft", "num_noise_levels": 3}}, 1, 0.0),
    ],
    ids=["one update", "two updates", "reference", "recompute", "guided", "matching"],
)
def test_mfu_is_flops_over_time_and_peak(
    parts: dict[str, Any],
    forwards: int,
    inferred: float,
    tiny_qwen_image: Path,
    ranks: Ranks,
    files: SyncBlobs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BASE and ADAPTED FLOPs a forward, whatever its width: what they are is shown by tests/flowfleet/planning."""
    monkeypatch.setattr(devices, "peak_flops", lambda device: PEAK)
    monkeypatch.setattr(mfu, "model_flops", fixed_flops)
    spec = make_spec(tiny_qwen_image, **parts)
    worker = make_worker(spec, ranks, files, tmp_path)
    request = Drawer(spec).draw(files, 0)

    metrics = worker.train(request).metrics

    levels = spec.algorithm.of(NoiseLevelSettings).num_noise_levels
    rounds = len(request.samples[0].sample.sde_steps) if spec.records_steps else levels
    rows = len(request.samples) * rounds * forwards
    is_full = spec.trainer.mode == "full"
    training = 3 * BASE if is_full else 2 * BASE + 3 * (ADAPTED - BASE)
    assert metrics["perf/mfu/actor"] == pytest.approx(rows * training / PEAK / metrics["timing_s/update_actor"])
    if inferred:
        seconds = metrics.get("timing_s/old_log_prob", 0.0) + metrics.get("timing_s/ref", 0.0)
        looked = rows * inferred * (BASE if is_full else ADAPTED)
        assert metrics["perf/mfu/actor_infer"] == pytest.approx(looked / PEAK / seconds)
    else:
        assert "perf/mfu/actor_infer" not in metrics


def fixed_flops(spec: JobSpec) -> ModelFlops:
    base, adapted = ForwardFlops((BASE,) * 3), ForwardFlops((ADAPTED,) * 3)
    return ModelFlops(base, None if spec.trainer.mode == "full" else adapted)


def test_a_model_that_cannot_be_counted_is_trained_all_the_same(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(spec: JobSpec) -> ModelFlops:
        raise NotImplementedError("no meta kernel")

    monkeypatch.setattr(devices, "peak_flops", lambda device: PEAK)
    monkeypatch.setattr(mfu, "model_flops", fails)
    spec = make_spec(tiny_qwen_image)
    metrics = make_worker(spec, ranks, files, tmp_path).train(Drawer(spec).draw(files, 0)).metrics

    assert metrics["actor/grad_norm"] > 0
    assert not [name for name in metrics if "mfu" in name]


class ThreadRank:
    """One of two ranks that are threads. Raises BrokenBarrierError where the other one takes no part."""

    world_size = 2

    def __init__(self, rank: int, meeting: Barrier, brought: list[torch.Tensor]) -> None:
        self.device = torch.device("cpu", rank)
        self._rank, self._meeting, self._brought = rank, meeting, brought

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self._brought[self._rank] = values
        self._meeting.wait(10)
        total = self._brought[0] + self._brought[1]
        self._meeting.wait(10)
        return total


@pytest.mark.parametrize(
    ("peaks", "failure"),
    [((PEAK, None), None), ((None, PEAK), None), ((PEAK, PEAK), OSError("no config.json")), ((PEAK, 3 * PEAK), None)],
    ids=["second unknown", "first unknown", "second cannot count", "all known"],
)
def test_ranks_that_differ_in_what_they_know_agree(
    peaks: tuple[float | None, float | None],
    failure: OSError | None,
    tiny_qwen_image: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed 1 tells the second rank's count from the first's."""
    rows = SimpleNamespace(is_padding=False, rows=(0, 1), negative=None)
    rows.prompts = SimpleNamespace(embeds=torch.zeros(1, 1, 4, 2))
    meeting, brought = Barrier(2), [torch.zeros(2)] * 2

    def count(spec: JobSpec) -> ModelFlops:
        if failure is not None and spec.seed == 1:
            raise failure
        return fixed_flops(spec)

    def measured(rank: int) -> dict[str, float]:
        spec = make_spec(tiny_qwen_image, trainer={"mode": "full"}).model_copy(update={"seed": rank})
        meter = mfu.Mfu(spec, cast(Ranks, ThreadRank(rank, meeting, brought)))
        return meter.metrics(cast(Any, [[rows]]), 3, {"update_actor": 2.0})

    monkeypatch.setattr(devices, "peak_flops", lambda device: peaks[device.index])
    monkeypatch.setattr(mfu, "model_flops", count)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(measured, range(2))
    work, seconds = 2 * 2 * 3 * 3 * BASE, 2.0
    assert first == second == ({} if None in peaks or failure else {"perf/mfu/actor": work / (seconds * 4 * PEAK)})


def test_a_bug_in_counting_is_not_taken_for_a_model_that_cannot_be_counted(
    tiny_qwen_image: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(spec: JobSpec) -> ModelFlops:
        raise AttributeError("counts")

    monkeypatch.setattr(devices, "peak_flops", lambda device: PEAK)
    monkeypatch.setattr(mfu, "model_flops", fails)
    with pytest.raises(AttributeError):
        mfu.Mfu(make_spec(tiny_qwen_image), ranks)


def test_without_a_known_peak_there_is_no_mfu(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = make_spec(tiny_qwen_image)
    metrics = make_worker(spec, ranks, files, tmp_path).train(Drawer(spec).draw(files, 0)).metrics

    assert not [name for name in metrics if "mfu" in name]


def test_sequences_count_their_tokens(
    ranks: Ranks, files: SyncBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates: the second one's old log-probs are a forward of their own."""
    monkeypatch.setattr(devices, "peak_flops", lambda device: PEAK)
    spec = sequences.make_spec(save_text_model(tmp_path / "model", "experts"), trainer={"updates_per_step": 2})
    worker = make_worker(spec, ranks, files, tmp_path)
    request = sequences.Writer(spec).write(files, 0)

    metrics = worker.train(request).metrics

    flops = sequence_flops(engine_of(worker).adapter)
    assert flops is not None
    samples = [item.sample for item in request.samples]
    inputs = [sample.prompt_tokens + sample.num_tokens - 1 for sample in samples]
    work = flops.training(inputs, [sample.num_tokens for sample in samples])
    assert metrics["perf/mfu/actor"] == pytest.approx(work / PEAK / metrics["timing_s/update_actor"])
    assert metrics["perf/mfu/actor_infer"] > 0
