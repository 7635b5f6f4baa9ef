"""AdamW wherever its moments are, against PyTorch's own and against float64."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from flowfleet.data.blobs import SyncBlobs
from flowfleet.errors import Conflict
from flowfleet.job.spec import OptimizerPart
from flowfleet.proto import trainer_pb2
from services.trainer.optim import adamw, moments
from services.trainer.optim.adamw import ShardedAdamW
from services.trainer.optim.quantized import BLOCK, QuantizedRows, dynamic_map
from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.steps import JOB, Drawer, make_spec
from tests.services.trainer.workers import engine_of, make_worker, trained_of

STATES = ("device", "host", "8bit")
SHAPES = {"a.matrix": (48, 300), "a.bias": (48,), "b.narrow": (9, 3), "b.filter": (5, 4, 70)}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several buckets and chunks."""
    monkeypatch.setattr(moments, "BUCKET_ELEMENTS", 15_000)
    monkeypatch.setattr(moments, "FAR_BUCKET_ELEMENTS", 15_000)
    monkeypatch.setattr(moments, "CHUNK_ELEMENTS", 3000)


def optimizer_of(state: Any, ranks: Ranks, **part: Any) -> tuple[ShardedAdamW, dict[str, Any]]:
    mesh = init_device_mesh("cpu", (1,))
    generator = torch.Generator().manual_seed(1)
    trained: dict[str, Any] = {
        name: nn.Parameter(distribute_tensor(torch.randn(shape, generator=generator), mesh))
        for name, shape in SHAPES.items()
    }
    return ShardedAdamW(trained, OptimizerPart(state=state, lr=1e-2, **part), ranks), trained


def targets() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradient(name: str, parameter: Tensor, step: int) -> Tensor:
    """Gradient of half the squared distance to a target, with noise whose size differs from row to row."""
    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
    rows = torch.logspace(-3, 0, len(parameter), dtype=parameter.dtype).view(-1, *[1] * (parameter.ndim - 1))
    return (parameter - targets()[name].to(parameter.dtype) + noise.to(parameter.dtype) / 4) * rows


def run(optimizer: ShardedAdamW, trained: dict[str, Any], steps: range, only: str = "") -> None:
    for step in steps:
        for name, parameter in trained.items():
            if name.startswith(only):
                grad = gradient(name, parameter.detach().to_local(), step)
                parameter.grad = type(parameter.data).from_local(grad, parameter.device_mesh, parameter.placements)
        assert optimizer.step(1e-2).applied


def oracle(start: dict[str, Tensor], steps: int, part: OptimizerPart) -> dict[str, Tensor]:
    """In float64, by PyTorch."""
    parameters = {name: nn.Parameter(tensor.double()) for name, tensor in start.items()}
    adamw = torch.optim.AdamW(
        parameters.values(), lr=part.lr, betas=part.betas, eps=part.eps, weight_decay=part.weight_decay
    )
    for step in range(steps):
        for name, parameter in parameters.items():
            parameter.grad = gradient(name, parameter.detach(), step)
        torch.nn.utils.clip_grad_norm_(parameters.values(), part.max_grad_norm)
        adamw.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def values(trained: dict[str, Any]) -> dict[str, Tensor]:
    return {name: parameter.detach().to_local().clone() for name, parameter in trained.items()}


@pytest.mark.parametrize("state", ["device", "host"])
def test_full_precision_is_pytorchs_adamw(state: str, ranks: Ranks) -> None:
    optimizer, trained = optimizer_of(state, ranks, weight_decay=0.1)
    expected = oracle(values(trained), 20, OptimizerPart(lr=1e-2, weight_decay=0.1))
    run(optimizer, trained, range(20))
    for name, value in values(trained).items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-4, atol=1e-5)


def test_the_host_computes_what_the_device_computes(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, also when a component has no gradient in some updates, and where the weights stream too."""
    results = []
    for state in ("device", "host", "far"):
        if state == "far":
            monkeypatch.setattr(adamw, "make_moments", lambda _, *rest: moments.HostMoments(*rest, with_weights=True))
        optimizer, trained = optimizer_of("host" if state == "far" else state, ranks)
        run(optimizer, trained, range(3))
        run(optimizer, trained, range(3, 5), only="b.")
        run(optimizer, trained, range(5, 7))
        assert optimizer.num_steps() == {"a": 5, "b": 7}
        results.append(values(trained))
    assert all(torch.equal(results[0][name], value) for other in results[1:] for name, value in other.items())


def test_eight_bits_end_where_thirty_two_do(ranks: Ranks) -> None:
    """After 200 steps towards a target, nearly as near to it: steps of the second moment that are smaller than half a
    code are lost, as in the paper's optimizer."""
    distances = {}
    for state in ("device", "8bit"):
        optimizer, trained = optimizer_of(state, ranks)
        start = sum(float((value - targets()[name]).square().sum()) for name, value in values(trained).items())
        run(optimizer, trained, range(200))
        distances[state] = sum(
            float((value - targets()[name]).square().sum()) for name, value in values(trained).items()
        )
    assert distances["device"] < 0.1 * start
    assert distances["8bit"] == pytest.approx(distances["device"], rel=0.3)


def test_eight_bits_take_a_quarter_of_the_memory(ranks: Ranks) -> None:
    optimizer, _ = optimizer_of("8bit", ranks)
    moments: Any = optimizer.moments()
    kept = {name: tensor.to_local() for name, tensor in moments.items()}
    wide = [tensor for name, tensor in kept.items() if name.endswith("a.matrix")]
    assert sum(tensor.nbytes for tensor in wide) == 2 * 48 * (300 + 2 * 4)
    assert kept["exp_avg.b.narrow"].dtype == kept["exp_avg.a.bias"].dtype == torch.float32


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_of_the_dynamic_map(signed: bool) -> None:
    """Compares with brute force; no positive number of the unsigned map becomes 0."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(6, 2, 200, generator=generator) * torch.logspace(-9, 0, 200)
    numbers = numbers if signed else numbers.square()
    rows = QuantizedRows(numbers.shape, numbers.device, signed=signed)
    assert torch.equal(rows.decode(slice(None)), torch.zeros_like(numbers))
    rows.encode(slice(0, 4), numbers[:4])
    rows.encode(slice(4, 6), numbers[4:])
    flat, decoded = numbers.view(6, 400).double(), rows.decode(slice(None)).view(6, 400).double()
    table = dynamic_map(signed).double()
    assert torch.unique(table).numel() == 256
    for start in (0, BLOCK):
        block, found = flat[:, start : start + BLOCK], decoded[:, start : start + BLOCK]
        scale = block.abs().amax(1, keepdim=True)
        distance = (block[:, :, None] - table * scale[:, :, None]).abs()
        least = distance.min(-1).values
        rounded_up = (
            (found > 0) & (block < table[1] * scale) if not signed else torch.zeros_like(found, dtype=torch.bool)
        )
        assert torch.all(((found - block).abs() <= least + 1e-6 * scale) | rounded_up)
    if not signed:
        assert torch.all((decoded > 0) == (flat > 0))


@pytest.mark.parametrize("state", STATES)
def test_a_resumed_job_goes_on_bit_for_bit(
    state: str, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = make_spec(tiny_qwen_image, trainer={"mode": "full", "optimizer": {"lr": 1e-3, "state": state}})
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    for step in range(2):
        worker.train(drawer.draw(files, step))
    worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
    resumed = make_worker(spec, ranks, files, tmp_path)
    before, after = (cast(Any, engine_of(each).optimizer.moments()) for each in (worker, resumed))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].to_local(), after[name].to_local()) for name in before)
    assert any(float(tensor.to_local().float().abs().max()) > 0 for tensor in after.values())
    request = drawer.draw(files, 2)
    losses = [each.train(request).metrics["actor/loss"] for each in (worker, resumed)]
    assert losses[0] == losses[1]
    assert all(torch.equal(trained_of(worker)[name], value) for name, value in trained_of(resumed).items())


def test_moments_in_eight_bits_are_not_those_in_thirty_two(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    worker = make_worker(make_spec(tiny_qwen_image), ranks, files, tmp_path)
    worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
    make_worker(make_spec(tiny_qwen_image, trainer={"optimizer": {"state": "host"}}), ranks, files, tmp_path)
    with pytest.raises(Conflict, match=r"trainer\.optimizer\.state"):
        make_worker(make_spec(tiny_qwen_image, trainer={"optimizer": {"state": "8bit"}}), ranks, files, tmp_path)
