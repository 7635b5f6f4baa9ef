"""Names, views and files of vLLM-Omni's parameters, on small modules; the entry point that chooses its platform."""

import copy
import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flowfleet.models.registry import FAMILIES
from services.rollout.engines.vllm_omni import parameters
from services.rollout.engines.vllm_omni.pipelines.registry import pipeline_for
from services.rollout.engines.vllm_omni.plugin import ASKED, TARGET, register
from services.rollout.engines.vllm_omni.task import Task

RENAMES = {".to_out.": ".to_out.0."}


class Fused(nn.Linear):
    output_sizes = (4, 2, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = Fused(3, 8)
        self.to_out = nn.Linear(4, 3, bias=False)


class Wrapped(nn.Module):
    """Wraps a layer like LoRA."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Transformer(nn.Module):
    packed_modules_mapping = {"to_qkv": ["to_q", "to_k", "to_v"]}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2))
        self.attn = Attention()


def live_of(transformer: Transformer) -> dict[str, torch.Tensor]:
    return parameters.live_parameters({"transformer": transformer}, RENAMES)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_parts_of_fused_linears_are_views_by_diffusers_names(is_wrapped: bool) -> None:
    transformer = Transformer()
    fused, out = transformer.attn.to_qkv, transformer.attn.to_out
    if is_wrapped:
        transformer.attn.to_qkv, transformer.attn.to_out = Wrapped(fused), Wrapped(out)  # type: ignore[assignment]
    live = live_of(transformer)
    assert {name: list(value.shape) for name, value in live.items()} == {
        "transformer.table": [2],
        "transformer.attn.to_q.weight": [4, 3],
        "transformer.attn.to_k.weight": [2, 3],
        "transformer.attn.to_v.weight": [2, 3],
        "transformer.attn.to_q.bias": [4],
        "transformer.attn.to_k.bias": [2],
        "transformer.attn.to_v.bias": [2],
        "transformer.attn.to_out.0.weight": [3, 4],
    }
    live["transformer.attn.to_k.weight"].fill_(7)
    assert torch.equal(fused.weight[4:6], torch.full((2, 3), 7.0))
    assert not (fused.weight[:4] == 7).any()


def test_a_folder_is_read_into_them_shard_by_shard(tmp_path: Path) -> None:
    live = live_of(Transformer())
    stored = {name.removeprefix("transformer."): torch.randn(value.shape) for name, value in live.items()}
    folder = tmp_path / "transformer"
    folder.mkdir()
    index = {}
    for number, name in enumerate(stored):
        index[name] = f"part-{number % 2}.safetensors"
    for part in set(index.values()):
        save_file({name: value for name, value in stored.items() if index[name] == part}, folder / part)
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    parameters.fill_from_folder(live, {}, tmp_path, ["transformer"])
    for name, value in stored.items():
        assert torch.equal(live[f"transformer.{name}"], value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"table": None}, "lacks 1 weights of its transformer, such as transformer.table"),
        ({"table": torch.zeros(3)}, r"table has shape \[3\], expected"),
        ({"more": torch.zeros(3)}, "more is not a parameter of this transformer"),
    ],
)
def test_a_folder_of_another_model_is_refused(
    tmp_path: Path, change: dict[str, torch.Tensor | None], told: str
) -> None:
    live = live_of(Transformer())
    stored = {name.removeprefix("transformer."): value.clone() for name, value in live.items()} | change
    (tmp_path / "transformer").mkdir()
    file = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name: value for name, value in stored.items() if value is not None}, file)
    with pytest.raises(ValueError, match=told):
        parameters.fill_from_folder(live, {}, tmp_path, ["transformer"])
    file.write_bytes(b"torn")
    with pytest.raises(ValueError, match="is not a whole file of safetensors"):
        parameters.fill_from_folder(live, {}, tmp_path, ["transformer"])


@pytest.mark.parametrize("index", ["torn", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"table": 1}}'])
def test_a_broken_index_is_named(tmp_path: Path, index: str) -> None:
    file = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    file.parent.mkdir()
    file.write_text(index)
    with pytest.raises(ValueError, match=f"{re.escape(str(file))} cannot be read"):
        parameters.fill_from_folder(live_of(Transformer()), {}, tmp_path, ["transformer"])


def test_a_task_is_passed_as_itself_and_keeps_what_came_of_it() -> None:
    task = Task(lambda target: target + 1)
    assert copy.deepcopy({"task": task})["task"] is task
    with pytest.raises(RuntimeError, match="abandoned a task"):
        task.result()
    task.run(2)
    assert task.result() == 3
    failing: Task[None] = Task(lambda target: target.missing)
    failing.run(2)
    with pytest.raises(AttributeError):
        failing.result()
    passing: Task[float] = Task(lambda target: 1 / target)
    with pytest.raises(ZeroDivisionError):
        passing.run(0, passing=(ZeroDivisionError,))
    assert not passing.is_done


def test_our_platform_is_for_cpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASKED, "1")
    monkeypatch.delenv(TARGET, raising=False)
    assert register() is None
    monkeypatch.setenv(TARGET, "cuda")
    assert register() is None
    monkeypatch.setenv(TARGET, "cpu")
    assert register() == "services.rollout.engines.vllm_omni.platform.CpuOmniPlatform"
    (point,) = [point for point in entry_points(group="vllm_omni.platform_plugins") if point.name == "flowfleet_cpu"]
    assert point.load() is register


def test_other_programs_that_use_vllm_omni_keep_their_imports_and_platform() -> None:
    """Run where torchvision is absent, as `slim_imports` then has work to do."""
    program = """
import sys
from importlib.metadata import entry_points
sys.modules["torchvision"] = None
before = set(sys.modules)
(point,) = [point for point in entry_points(group="vllm_omni.platform_plugins") if point.name == "flowfleet_cpu"]
assert point.load()() is None
assert [name for name in set(sys.modules) - before if name.startswith(("vllm", "torch"))] == []
"""
    environment = {name: value for name, value in os.environ.items() if name != ASKED} | {TARGET: "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_families_without_a_pipeline_are_refused() -> None:
    with pytest.raises(ValueError, match=r"does not draw FLUX\.1: start rollouts with --engine diffusers"):
        pipeline_for(FAMILIES["FluxPipeline"])
    with pytest.raises(ValueError, match=r"rounds rotated queries and keys to bfloat16.*--engine diffusers"):
        pipeline_for(FAMILIES["HunyuanImage3ForCausalMM"])
    assert pipeline_for(FAMILIES["QwenImagePipeline"]).endswith("QwenImageRolloutPipeline")
