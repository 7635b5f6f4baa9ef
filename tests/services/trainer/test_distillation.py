"""A policy that learns from teachers, against plain PyTorch: exported adapters and a checkpoint of other jobs teach."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowfleet.data.blobs import SyncBlobs
from flowfleet.errors import InvalidRequest
from flowfleet.job.spec import JobSpec
from flowfleet.proto import trainer_pb2
from flowfleet.proto.trainer_pb2 import TrainSample, TrainStepRequest
from flowfleet.weights.lora import named_adapter_parameters
from services.trainer.parallel.ranks import Ranks
from services.trainer.step.batches import plan_passes
from services.trainer.step.requests import check_request
from tests.services.trainer.oracle import Oracle
from tests.services.trainer.ranked import blobs_of
from tests.services.trainer.steps import JOB, Drawer, make_spec
from tests.services.trainer.workers import engine_of, make_worker, trained_of

TEACHERS = ("letters", "colors")
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory, tiny_qwen_image: Path, ranks: Ranks) -> Path:
    """Folders of jobs of one step by the names of TEACHERS, as in test_warm_start.py."""
    root = tmp_path_factory.mktemp("teachers")
    for seed, name in enumerate(TEACHERS, 5):
        folder = root / name
        folder.mkdir()
        blobs, spec = blobs_of(folder), make_spec(tiny_qwen_image).model_copy(update={"seed": seed})
        worker = make_worker(spec, ranks, blobs, folder)
        worker.train(Drawer(spec).draw(blobs, 0))
        worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
        worker.export(trainer_pb2.ExportModelRequest(job_id=JOB, directory=str(folder / "model")))
    return root


def places_of(teachers: Path) -> dict[str, Path]:
    """An export, and a checkpoint."""
    return {"letters": teachers / "letters/model", "colors": teachers / "colors/checkpoints/step-00000001"}


def spec_of(model: Path, teachers: Path, **trainer: Any) -> JobSpec:
    adapters = {name: {"adapter": str(place), "sources": [name]} for name, place in places_of(teachers).items()}
    return make_spec(
        model,
        algorithm={"name": "diffusion_opd", "teachers": adapters},
        rollout={"guidance_scale": 2.0, "window": {"strategy": "fixed", "size": 2}},
        data={"train": None, "sources": [{"name": name, "path": f"{name}.txt"} for name in TEACHERS]},
        trainer={"optimizer": OPTIMIZER, "updates_per_step": 2, "deterministic": False, **trainer},
        rewards={},
    )


def taught(request: TrainStepRequest) -> TrainStepRequest:
    """Samples of one group in turn by each teacher, so that micro-batches mix them."""
    for item in request.samples:
        item.advantage, item.teacher = 0.0, TEACHERS[(item.sample.id.group + item.sample.id.index) % 2]
    return request


class DistillationOracle(Oracle):
    """Every formula written out; each teacher is a copy of the whole model with its adapter's tensors copied in."""

    def __init__(self, spec: JobSpec, files: SyncBlobs, adapters: dict[str, dict[str, Tensor]]) -> None:
        super().__init__(spec, files)
        self.teachers = {}
        for name, state in adapters.items():
            model = copy.deepcopy(self.adapter)
            for key, parameter in named_adapter_parameters(model.experts).items():
                parameter.data.copy_(state[key])
            self.teachers[name] = model

    def train(self, request: TrainStepRequest) -> list[float]:
        spec, losses = self.spec, []
        for part in plan_passes(check_request(request, spec), spec, request.step, 1):
            for update in part:
                items = [request.samples[row] for batch in update.by_rank[0] for row in batch.rows]
                loss = self._distilled(items)
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(self.trained.values(), spec.trainer.optimizer.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    def _distilled(self, items: Sequence[TrainSample]) -> Tensor:
        rows = []
        for item in items:
            for k, step in enumerate(item.sample.sde_steps):
                _, mean, std, _ = self._step(self.adapter, [item], k, step)
                with torch.no_grad():
                    _, teacher, _, _ = self._step(self.teachers[item.teacher], [item], k, step)
                rows.append(((mean - teacher) ** 2).mean() / (2 * std**2))
        return torch.stack(rows).mean()


def adapters_of(teachers: Path) -> dict[str, dict[str, Tensor]]:
    letters = load_file(teachers / "letters/model/pytorch_lora_weights.safetensors")
    files = (teachers / "colors/checkpoints/step-00000001").glob("*.safetensors")
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    colors = {name.removeprefix("trained."): tensor for name, tensor in stored.items() if name.startswith("trained.")}
    return {"letters": letters, "colors": colors}


@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_two_steps_equal_plain_pytorch(
    passes: int, teachers: Path, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """Covers guidance, two teachers in one micro-batch and two updates; teachers are as they were after all of it."""
    spec = spec_of(tiny_qwen_image, teachers, passes=passes)
    adapters = adapters_of(teachers)
    worker, oracle, drawer = (
        make_worker(spec, ranks, files, tmp_path),
        DistillationOracle(spec, files, adapters),
        Drawer(spec),
    )
    before = trained_of(worker)
    for step in range(2):
        request = taught(drawer.draw(files, step))
        metrics, losses = worker.train(request).metrics, oracle.train(request)
        assert metrics["actor/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        assert metrics["actor/teacher_kl"] > 0
    after = trained_of(worker)
    assert any(not torch.equal(after[name], before[name]) for name in after)
    for name, tensor in oracle.state().items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-4, atol=1e-5)
    for name, shards in engine_of(worker).policies._teachers.items():
        for key, shard in shards.items():
            assert torch.equal(shard, adapters[name][key]), (name, key)


def test_a_trainer_that_resumes_reads_its_teachers_again(
    teachers: Path, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = spec_of(tiny_qwen_image, teachers)
    drawer, worker = Drawer(spec), make_worker(spec, ranks, files, tmp_path)
    requests = [taught(drawer.draw(files, step)) for step in range(2)]
    worker.train(requests[0])
    worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
    worker.train(requests[1])
    again = make_worker(spec, ranks, files, tmp_path)
    again.train(requests[1])
    for name, tensor in trained_of(worker).items():
        assert torch.equal(trained_of(again)[name], tensor), name


@pytest.mark.long
def test_a_policy_comes_closer_to_its_teacher(
    teachers: Path, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """On the same samples again and again the KL to the teacher falls to a small part of what it was."""
    spec = spec_of(tiny_qwen_image, teachers, optimizer={"lr": 3e-3}, updates_per_step=1)
    worker, request = make_worker(spec, ranks, files, tmp_path), taught(Drawer(spec).draw(files, 0))
    kls = []
    for step in range(24):
        request.step = step
        for item in request.samples:
            item.sample.id.step, item.teacher = step, "letters"
        kls.append(worker.train(request).metrics["actor/teacher_kl"])
    assert kls[-1] < 0.2 * kls[0]


def test_a_sample_needs_one_of_the_teachers(
    teachers: Path, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = spec_of(tiny_qwen_image, teachers)
    worker, request = make_worker(spec, ranks, files, tmp_path), taught(Drawer(spec).draw(files, 0))
    request.samples[1].teacher = "shapes"
    with pytest.raises(InvalidRequest, match="its teacher is 'shapes', the job's are letters, colors"):
        worker.train(request)


def test_a_teacher_of_another_rank_is_refused(
    teachers: Path, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = spec_of(tiny_qwen_image, teachers, lora={"rank": 4, "alpha": 6.0})
    with pytest.raises(
        InvalidRequest, match=r"^algorithm.teachers.letters.adapter: .* has rank 3, and trainer.lora.rank is 4"
    ):
        make_worker(spec, ranks, files, tmp_path)


def test_the_settings_reach_the_trainer_as_json(teachers: Path, tiny_qwen_image: Path) -> None:
    spec = spec_of(tiny_qwen_image, teachers)
    assert JobSpec.model_validate(json.loads(spec.model_dump_json())) == spec
