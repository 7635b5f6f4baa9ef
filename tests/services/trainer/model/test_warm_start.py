"""Jobs that start from an adapter: bit for bit where nothing is rounded, and refused with what to change elsewhere."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowfleet.data.blobs import SyncBlobs
from flowfleet.errors import DataLoss, InvalidRequest
from flowfleet.job.adapter_files import find_adapter
from flowfleet.job.fingerprints import CHANGED, fingerprints
from flowfleet.job.spec import JobSpec
from flowfleet.models.registry import adapter_for
from flowfleet.proto import trainer_pb2
from services.trainer.checkpoints.state import read_state, write_state
from services.trainer.model.engine import Engine
from services.trainer.model.policies import Policy
from services.trainer.parallel.ranks import Ranks
from services.trainer.worker import Worker
from tests.services.trainer.ranked import blobs_of, prepare
from tests.services.trainer.steps import JOB, Drawer, make_spec
from tests.services.trainer.test_experts import spec_of, velocity
from tests.services.trainer.test_experts import wan as wan
from tests.services.trainer.test_matching_ranks import torchrun
from tests.services.trainer.workers import engine_of, make_worker, state_of, trained_of

FILE = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_qwen_image: Path, ranks: Ranks) -> Path:
    """The folder of a job of two steps: `model` is its export, `checkpoints/step-00000002` its checkpoint."""
    folder = tmp_path_factory.mktemp("job")
    blobs, spec = blobs_of(folder), make_spec(tiny_qwen_image)
    worker, drawer = make_worker(spec, ranks, blobs, folder), Drawer(spec)
    for step in range(2):
        worker.train(drawer.draw(blobs, step))
    worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
    worker.export(trainer_pb2.ExportModelRequest(job_id=JOB, directory=str(folder / "model")))
    save_file(trained_of(worker), folder / "trained.safetensors")
    return folder


def start_from(path: Path, model: Path, **lora: Any) -> JobSpec:
    part = {"rank": 3, "alpha": 6.0} | lora
    return make_spec(
        model, model={"path": str(model), "dtype": "float32", "adapter": str(path)}, trainer={"lora": part}
    )


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("place", ["model", f"model/{FILE}", "checkpoints/step-00000002"])
def test_a_job_starts_from_what_another_left(
    place: str, job: Path, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    worker = make_worker(start_from(job / place, tiny_qwen_image), ranks, files, tmp_path)
    assert_equal(trained_of(worker), load_file(job / "trained.safetensors"))
    assert worker.job is not None
    assert worker.job.record.version == 0  # a job of its own
    assert engine_of(worker).optimizer.num_steps() == {"transformer": 0}


def test_it_starts_from_an_adapter_of_pefts(
    job: Path, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """Files as `PeftModel.save_pretrained` writes them, which Flow-GRPO's and DiffusionNFT's scripts call."""
    transformer = (
        adapter_for(str(tiny_qwen_image)).load(str(tiny_qwen_image), dtype=torch.float32).experts["transformer"]
    )
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["to_q", "img_mlp.net.2"], init_lora_weights=False)
    peft: Any = get_peft_model(transformer, config)
    peft.save_pretrained(tmp_path / "lora")
    expected = {
        name.replace("base_model.model.", "transformer.").replace(".default.", "."): parameter.detach()
        for name, parameter in peft.named_parameters()
        if ".lora_" in name
    }
    for path in (tmp_path / "lora", tmp_path / "lora/adapter_model.safetensors"):
        spec = start_from(path, tiny_qwen_image, target_modules=("to_q", "img_mlp.net.2"))
        assert_equal(trained_of(make_worker(spec, ranks, files, tmp_path / "job")), expected)


def test_the_reference_is_the_base_and_the_old_policy_the_adapter(
    job: Path, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """The originals' reference is the model with the adapter switched off."""
    plain = start_from(job / "model", tiny_qwen_image)
    spec = make_spec(
        tiny_qwen_image,
        model=plain.model.model_dump(),
        algorithm={"name": "diffusion_nft", "kl_coef": 0.1},
        trainer={"lora": plain.trainer.lora.model_dump()},
    )
    engine, own = engine_of(make_worker(spec, ranks, files, tmp_path)), Drawer(spec).adapter

    def by(policy: Policy | None) -> Tensor:
        with nullcontext() if policy is None else engine.policy(policy):
            return velocity(engine.adapter, own, spec, 0.7)

    torch.testing.assert_close(by("reference"), velocity(own, own, spec, 0.7), rtol=0, atol=1e-6)
    assert torch.equal(by("old"), by(None))
    assert not torch.allclose(by(None), by("reference"), rtol=0, atol=1e-3)


def test_a_resumed_job_does_not_need_the_adapter_any_more(
    job: Path, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    adapter = shutil.copytree(job / "model", tmp_path / "adapter")
    spec = start_from(adapter, tiny_qwen_image)
    worker = make_worker(spec, ranks, files, tmp_path)
    worker.train(Drawer(spec).draw(files, 0))
    worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
    shutil.rmtree(adapter)
    resumed = make_worker(spec, ranks, files, tmp_path)
    assert_equal(trained_of(resumed), trained_of(worker))
    with pytest.raises(InvalidRequest, match="is not there"):
        make_worker(spec, ranks, files, tmp_path / "another")


@pytest.mark.long
def test_two_ranks_fill_their_own_shards(job: Path, tiny_qwen_image: Path, tmp_path: Path) -> None:
    """Rank 3 does not divide by two. Nothing is trained: what is published is what was read."""
    for name, place in (("export", "model"), ("checkpoint", "checkpoints/step-00000002")):
        spec = start_from(job / place, tiny_qwen_image)
        spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"world_size": 2})})
        prepare(tmp_path / name, spec, [])
    torchrun(tmp_path / "export", tmp_path / "checkpoint")
    for name in ("export", "checkpoint"):
        assert_equal(load_file(tmp_path / name / "published.safetensors"), load_file(job / "trained.safetensors"))


def test_both_experts_start_from_their_own_file(wan: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path) -> None:
    spec = spec_of(wan, "lora", ema={"decay": None})  # what is exported is what is published
    worker = make_worker(spec, ranks, files, tmp_path)
    worker.train(Drawer(spec).draw(files, 0))
    worker.export(trainer_pb2.ExportModelRequest(job_id=JOB, directory=str(tmp_path / "model")))
    model = spec.model.model_copy(update={"adapter": str(tmp_path / "model")})
    started = make_worker(spec.model_copy(update={"model": model}), ranks, files, tmp_path / "next")
    assert_equal(trained_of(started), state_of(worker))
    (tmp_path / "model/pytorch_lora_weights_transformer_2.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=r"has no pytorch_lora_weights_transformer_2.safetensors for"):
        make_worker(spec.model_copy(update={"model": model}), ranks, files, tmp_path / "none")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another rank": ({"rank": 4}, "has rank 3, and trainer.lora.rank is 4: set that to 3"),
    "another alpha": ({"alpha": 3.0}, "has alpha 6, and trainer.lora.alpha is 3: set that to 6"),
    "fewer modules": (
        {"target_modules": ("to_q",)},
        r'which the job does not: set trainer.lora.target_modules to \["add',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("place", ["model", "checkpoints/step-00000002"])
def test_settings_that_differ_are_named(name: str, place: str, job: Path, tiny_qwen_image: Path, ranks: Ranks) -> None:
    lora, problem = REFUSED[name]
    if place != "model":  # a checkpoint's names tell no targets
        problem = problem.replace(r'\["add', "the modules that it adapts")
    with pytest.raises(ValueError, match=f"^model.adapter: {job / place} .*{problem}"):
        Engine(start_from(job / place, tiny_qwen_image, **lora), ranks)


def test_a_file_that_does_not_tell_its_alpha_has_its_rank(
    job: Path, tiny_qwen_image: Path, ranks: Ranks, tmp_path: Path
) -> None:
    save_file(load_file(job / "model" / FILE), tmp_path / FILE)  # without metadata, as older diffusers wrote it
    Engine(start_from(tmp_path, tiny_qwen_image, alpha=3.0), ranks)
    with pytest.raises(ValueError, match=r"has alpha 3, and trainer.lora.alpha is 6: set that to 3"):
        Engine(start_from(tmp_path, tiny_qwen_image), ranks)


def test_what_is_no_adapter_is_refused(job: Path, tiny_qwen_image: Path, ranks: Ranks, tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(ValueError, match=r"^model.adapter: ") as caught:
            Engine(start_from(path, tiny_qwen_image), ranks)
        return str(caught.value)

    assert "is not there: give a folder with pytorch_lora" in refusal(tmp_path / "none")
    assert "holds no adapter: give a folder with pytorch_lora" in refusal(tiny_qwen_image)
    foreign = {f"lora_unet_{key}": value for key, value in load_file(job / "model" / FILE).items()}
    save_file(foreign, tmp_path / FILE)
    assert "is not named as diffusers or PEFT name a factor" in refusal(tmp_path)
    (tmp_path / FILE).write_bytes(b"torn")
    assert "is not a whole file of safetensors" in refusal(tmp_path)
    save_file({}, tmp_path / FILE)
    assert "holds no factors of LoRA: give an adapter" in refusal(tmp_path)
    partial = shutil.copytree(job / "checkpoints/step-00000002", tmp_path / "step-00000002")
    next(partial.glob("*.safetensors")).unlink()
    assert "is not a complete checkpoint" in refusal(partial)
    peft = tmp_path / "peft"
    peft.mkdir()
    shutil.copy(job / "model" / FILE, peft / "adapter_model.safetensors")
    (peft / "adapter_config.json").write_text(json.dumps({"use_dora": True}))
    assert "has use_dora = true, so it is not base + B·A: merge it" in refusal(peft)
    (peft / "adapter_config.json").write_text("{}")
    assert "is not named as" in refusal(peft)


def test_a_model_or_adapter_that_was_changed_since_the_job_began_is_not_loaded(
    job: Path, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = start_from(shutil.copytree(job / "model", tmp_path / "adapter"), tiny_qwen_image)
    request = trainer_pb2.ConfigureRequest(
        job_id=JOB, spec_json=spec.model_dump_json(), directory=str(tmp_path / "checkpoints"), inputs=fingerprints(spec)
    )
    for setting in ("model.path", "model.adapter"):
        changed = trainer_pb2.ConfigureRequest()
        changed.CopyFrom(request)
        changed.inputs[setting] = "1:another"
        with pytest.raises(DataLoss, match=f"^{setting}: .* {CHANGED}"):
            Worker(ranks, files).configure(changed)
    Worker(ranks, files).configure(request)


def test_old_checkpoints_do_not_tell_their_alpha(
    job: Path, tiny_qwen_image: Path, ranks: Ranks, tmp_path: Path
) -> None:
    old = shutil.copytree(job / "checkpoints/step-00000002", tmp_path / "step-00000002")
    state = read_state(old)
    assert state.pop("lora_alpha") == 6.0
    write_state(old, state)
    Engine(start_from(old, tiny_qwen_image, alpha=1.0), ranks)


def test_the_layout_is_found_by_names_alone(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for name, layout in (("adapter_model.safetensors", "peft"), (FILE, "diffusers"), ("state.json", "checkpoint")):
        save_file({}, tmp_path / name)
        assert find_adapter(tmp_path).layout == layout  # a checkpoint before an export before PEFT's


def export(worker: Worker, directory: Path) -> Path:
    request = trainer_pb2.ExportModelRequest(job_id=JOB, directory=str(directory))
    return Path(worker.export(request).path)
