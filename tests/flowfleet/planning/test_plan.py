"""Predicted peaks against what was measured, and against the arithmetic of optimizer and FSDP2."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowfleet.algorithms.registry import LOSSES
from flowfleet.job.files import changed_job, prepare_job
from flowfleet.job.spec import EmaPart, JobSpec, TeacherPart, parse_job
from flowfleet.job.training import MeshPart
from flowfleet.planning.advice import advise
from flowfleet.planning.automatic import settled
from flowfleet.planning.facts import Facts, gather
from flowfleet.planning.memory import (
    GIB,
    RESERVE,
    TrainerMemory,
    checkpoint_bytes,
    rollout_memory,
    trainer_memory,
)
from flowfleet.planning.plan import predict
from flowfleet.planning.work import work
from services.trainer.step.gradients.store import GradientStore, RowGradient

PROTOTYPE_LACKED = ("masters", "optimizer state", "gradients, whole", "samples")
"""What the LoRA runs behind the measurements had none of: adapters in bf16, one backward, no optimizer, no job."""


def as_measured(memory: TrainerMemory) -> float:
    """GiB of an update without those parts."""
    return (memory.update_peak - sum(memory.parts.get(name, 0.0) for name in PROTOTYPE_LACKED)) / GIB


@pytest.fixture(scope="module")
def eager(full_size: Path) -> tuple[JobSpec, Facts]:
    spec = lora_spec(full_size, micro_batch_size=16, gradient_checkpointing="full")
    return spec, gather(spec, 128, compiled=False)


def lora_spec(path: Path, **part: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": {"path": str(path)},
            "data": {"train": "x"},
            "rewards": {"ocr": {}},
            "rollout": {"batch_size": 4},
            "trainer": {"lora": {"rank": 64}, **part},
        }
    )


def test_a_job_that_writes_text_is_not_planned_yet() -> None:
    job = {"model": {"path": "m"}, "data": {"train": "t.txt"}, "rewards": {"r": {}}, "algorithm": {"name": "gspo"}}
    with pytest.raises(ValueError, match=r"algorithm\.loss = gspo: .* cannot be planned yet"):
        predict(parse_job(job))


def test_eager_lora_on_one_gpu_was_measured_at_48_gib(eager: tuple[JobSpec, Facts]) -> None:
    assert as_measured(trainer_memory(*eager)) == pytest.approx(48, rel=0.15)


def test_small_branches_of_guidance_are_held_at_once(eager: tuple[JobSpec, Facts]) -> None:
    """A block that is computed again holds the rows of both where they go in one forward, and of one where not."""
    spec, facts = eager
    guided = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"guidance_scale": 4.0})})

    def activations(spec: JobSpec, rows: int) -> float:
        return trainer_memory(changed(spec, micro_batch_size=rows), facts).parts["activations"]

    assert activations(guided, 2) == pytest.approx(activations(spec, 4))
    assert activations(spec, 16) < activations(guided, 16) < activations(spec, 32)


@pytest.mark.long
def test_compiled_lora_on_four_gpus_was_measured(full_size: Path) -> None:
    spec = lora_spec(full_size, micro_batch_size=16, world_size=4, compile=True, sharding="fsdp")
    facts = gather(spec, 128, compiled=True)

    def predicted(**part: Any) -> float:
        return as_measured(trainer_memory(changed(spec, **part), facts))

    assert predicted(gradient_checkpointing="full") == pytest.approx(21, rel=0.15)
    assert predicted() == pytest.approx(134, rel=0.15)
    assert predicted(micro_batch_size=8) == pytest.approx(73, rel=0.15)


def test_full_fine_tuning_on_four_gpus_was_measured_at_76_gib(eager: tuple[JobSpec, Facts]) -> None:
    """In the optimizer's step, where no activation is left; the measurement's update had no moments yet."""
    spec, facts = eager
    full = changed(spec, mode="full", world_size=4)

    assert trainer_memory(full, replace(facts, trained=facts.params)).optimizer_peak / GIB == pytest.approx(
        76, rel=0.15
    )


def test_ranks_of_lora_hold_the_whole_base_each_where_half_a_device_has_room_for_it(
    eager: tuple[JobSpec, Facts],
) -> None:
    """41 GB in bf16: on 141 GB devices, not on 80 GB ones."""
    spec, facts = eager
    alone, two = spec, changed(spec, world_size=2)
    base = 2 * facts.params

    def held(spec: JobSpec, device: float | None) -> float:
        return trainer_memory(spec, facts, device).parts["frozen base"]

    assert held(alone, 80e9) == held(two, 141e9) == held(two, None) == base
    assert held(two, 80e9) == held(changed(two, sharding="fsdp"), 141e9) == base / 2
    assert held(changed(two, sharding="replicate"), 80e9) == base
    whole, spread = trainer_memory(two, facts), trainer_memory(changed(two, sharding="fsdp"), facts)
    assert whole.parts["masters"] == 2 * spread.parts["masters"]
    full = replace(facts, trained=facts.params)
    assert trainer_memory(changed(two, mode="full"), full, 141e9).parts["masters"] == 4 * facts.params / 2


def changed(spec: JobSpec, **part: Any) -> JobSpec:
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update=part)})


@pytest.mark.parametrize(("state", "bytes_each"), [("device", 16), ("host", 8), ("8bit", 10 + 8 / 256)])
def test_the_optimizers_step_holds_masters_gradients_and_moments(
    eager: tuple[JobSpec, Facts], state: str, bytes_each: float
) -> None:
    spec, facts = eager
    optimizer = spec.trainer.optimizer.model_copy(update={"state": state})
    full = changed(spec, mode="full", world_size=8, optimizer=optimizer)
    memory = trainer_memory(full, replace(facts, trained=facts.params))

    streamed = {"device": 0, "host": 3 * 2 * 4 * 2**26, "8bit": 2 * 4 * 2**24}[state]
    weights = facts.params * bytes_each / 8
    assert memory.optimizer_peak - memory.parts["samples"] == pytest.approx(weights + streamed)
    assert memory.host >= (8 * facts.params / 8 if state == "host" else 0)
    assert "frozen base" not in memory.parts


def test_no_gradients_are_there_at_the_start_of_a_step_whose_updates_are_one_backward(
    eager: tuple[JobSpec, Facts],
) -> None:
    spec, facts = eager
    window = spec.rollout.window.model_copy(update={"size": 1})
    one = spec.model_copy(
        update={
            "rollout": spec.rollout.model_copy(update={"window": window, "prompts_per_step": 1, "group_size": 16}),
        }
    )
    one = changed(one, updates_per_step=1, world_size=2, sharding="fsdp")
    two = changed(one, micro_batch_size=4)

    first, second = trainer_memory(one, facts), trainer_memory(two, facts)

    held = ("gradients", "gradients, whole")
    assert first.update_peak == pytest.approx(sum(size for name, size in first.parts.items() if name not in held))
    assert second.update_peak == pytest.approx(sum(second.parts.values()))


@pytest.mark.parametrize("micro_batch_size", [1, 16])
def test_an_adapter_that_is_whole_keeps_its_sums_and_has_gradients_once_activations_are_freed(
    eager: tuple[JobSpec, Facts], micro_batch_size: int
) -> None:
    spec, facts = eager
    memory = trainer_memory(changed(spec, micro_batch_size=micro_batch_size), facts)
    assert memory.parts["gradients"] == 2 * memory.parts["gradients, whole"] == 4 * facts.trained
    assert memory.update_peak == pytest.approx(sum(memory.parts.values()) - memory.parts["gradients, whole"])
    in_fp32 = spec.model_copy(update={"model": spec.model.model_copy(update={"dtype": "float32"})})
    assert "copy for the forward" not in trainer_memory(in_fp32, facts).parts
    held = sum(memory.parts[name] for name in ("masters", "gradients", "copy for the forward", "optimizer state"))
    assert memory.optimizer_peak == pytest.approx(memory.parts["frozen base"] + memory.parts["samples"] + held)


def test_a_reference_and_an_old_policy_are_copies_of_the_shards(eager: tuple[JobSpec, Facts]) -> None:
    spec, facts = eager
    full = changed(spec, mode="full", world_size=4)
    with_reference = full.model_copy(update={"algorithm": spec.algorithm.model_copy(update={"kl_coef": 0.1})})

    assert trainer_memory(with_reference, facts).parts["reference"] == 2 * facts.params / 4
    assert "reference" not in trainer_memory(full, facts).parts


def test_each_teacher_is_an_adapter_in_fp32_on_every_rank(eager: tuple[JobSpec, Facts]) -> None:
    spec, facts = eager
    teachers = {name: TeacherPart(adapter=name, sources=(name,)) for name in ("one", "two")}
    part = LOSSES["diffusion_opd"].model.model_validate(
        {"name": "diffusion_opd", "loss": "diffusion_opd", "teachers": teachers}
    )
    taught = spec.model_copy(update={"algorithm": part})
    plain, held = trainer_memory(spec, facts), trainer_memory(taught, facts)
    assert held.parts["teachers"] == 2 * 4 * facts.trained
    assert held.update_peak - plain.update_peak == pytest.approx(held.parts["teachers"])
    assert checkpoint_bytes(taught, facts) == checkpoint_bytes(spec, facts)  # they are read from their own files


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_an_average_is_a_copy_of_what_a_rank_trains_in_fp32_and_nothing_in_replicas(
    eager: tuple[JobSpec, Facts], mode: str
) -> None:
    """Full fine-tuning of Qwen-Image: 82 GB over all ranks."""
    spec, facts = eager
    plain = changed(spec, mode=mode, world_size=4)
    facts = facts if mode == "lora" else replace(facts, trained=facts.params)
    averaged = changed(plain, ema=EmaPart(decay=0.9))
    without, held = trainer_memory(plain, facts), trainer_memory(averaged, facts)
    assert held.parts["average"] == 4 * facts.trained / (4 if mode == "full" else 1)
    assert held.update_peak - without.update_peak == pytest.approx(held.parts["average"])
    assert held.optimizer_peak - without.optimizer_peak == pytest.approx(held.parts["average"])
    assert checkpoint_bytes(averaged, facts) - checkpoint_bytes(plain, facts) == 4 * facts.trained
    assert rollout_memory(averaged, facts) == rollout_memory(plain, facts)
    if mode == "full":
        assert 4 * facts.trained == pytest.approx(82e9, rel=0.01)


def test_fp8_rollouts_have_a_byte_more_for_each_large_linear_of_the_blocks(eager: tuple[JobSpec, Facts]) -> None:
    spec, facts = eager
    fp8 = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"quantization": "fp8"})})

    width, layers = 3072, 60  # 8 of d x d, and 4 of d x 4d, a block
    assert rollout_memory(fp8, facts).parts["fp8 copies"] == layers * (8 + 4 * 4) * width**2
    assert rollout_memory(fp8, facts).peak == rollout_memory(spec, facts).peak + layers * 24 * width**2


def test_a_quantized_base_takes_a_byte_for_each_large_linear_of_the_blocks(eager: tuple[JobSpec, Facts]) -> None:
    """And layers with a table none: 14 GB in place of 41, whole on ranks of 80 GB devices too."""
    spec, facts = eager
    quantized = changed(spec, world_size=2).model_copy(update={"model": spec.model.model_copy(update={"base": "fp8"})})
    assert facts.tabled == 60 * 2 * (6 * 3072 * 3072 + 6 * 3072) + 2 * 3072 * 3072 + 2 * 3072
    base = 2 * (facts.params - facts.tabled) - facts.fp8
    assert base == pytest.approx(13.6e9, rel=0.01)
    assert trainer_memory(quantized, facts, 80e9).parts["frozen base"] == base
    parts = rollout_memory(quantized, facts).parts
    assert parts["transformer"] == base
    assert "fp8 copies" not in parts


def test_a_merged_adapter_takes_copies_of_the_weights_that_it_changes(eager: tuple[JobSpec, Facts]) -> None:
    """In bfloat16 two bytes each, of float8 ones one. Qwen-Image's targets are its large linears."""
    spec, facts = eager
    merged = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"adapter": "merged"})})
    assert rollout_memory(merged, facts).parts["merged weights"] == 2 * facts.fp8 == 2 * 60 * 24 * 3072**2
    quantized = merged.model_copy(update={"model": spec.model.model_copy(update={"base": "fp8"})})
    assert rollout_memory(quantized, facts).parts["merged weights"] == facts.fp8
    assert "merged weights" not in rollout_memory(spec, facts).parts


def test_best_of_trains_on_fewer_and_a_kl_in_the_reward_samples_more(eager: tuple[JobSpec, Facts]) -> None:
    """4 of a group's 16 samples are trained on; at the 2 noisy steps of 10 the reference computes too."""
    spec, facts = eager
    halved = spec.model_copy(update={"algorithm": spec.algorithm.model_copy(update={"best_of": 4, "kl_reward": 0.1})})
    before, after = work(spec, facts, 128), work(halved, facts, 128)
    assert (before.samples, before.trained, after.samples, after.trained) == (512, 512, 512, 128)
    denoising = [one.rollout_flops_per_sample - facts.decode_flops for one in (before, after)]
    assert denoising[1] / denoising[0] == pytest.approx(12 / 10)
    assert before.flops - after.flops == pytest.approx(
        384 * before.train_flops_per_sample - 512 * (denoising[1] - denoising[0])
    )
    samples = [trainer_memory(one, facts).parts["samples"] for one in (spec, halved)]
    assert samples[0] == 4 * samples[1]


def test_what_is_advised_fits(eager: tuple[JobSpec, Facts]) -> None:
    spec, facts = eager
    greedy = changed(spec, gradient_checkpointing="none")
    limit = 80 * GIB - RESERVE
    assert trainer_memory(greedy, facts).peak > limit

    advice = advise(greedy, facts, limit)

    assert any(line.startswith('trainer: trainer.gradient_checkpointing = "full" needs') for line in advice)
    rows = next(int(line.split(" = ")[1].split()[0]) for line in advice if "micro_batch_size" in line)
    assert trainer_memory(changed(greedy, micro_batch_size=rows), facts).peak <= limit
    assert trainer_memory(changed(greedy, micro_batch_size=2 * rows), facts).peak > limit
    assert advise(spec, facts, limit) == []


def test_offload_takes_masters_and_moments_then_inputs_of_blocks_off_the_device(
    eager: tuple[JobSpec, Facts], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, facts = eager
    full = changed(spec, gradient_checkpointing="full")
    none, optimizer, activations = (
        trainer_memory(changed(full, offload=it), facts) for it in ("none", "optimizer", "activations")
    )
    assert none.update_peak - optimizer.update_peak == 12 * facts.trained
    assert optimizer.host - none.host == 12 * facts.trained
    left = optimizer.parts["activations"] - activations.parts["activations"]
    assert left == pytest.approx(
        0.9 * facts.activations.inputs * spec.trainer.micro_batch_size / facts.activations.rows
    )

    monkeypatch.setattr("flowfleet.planning.automatic.gather", lambda *_, **__: facts)
    automatic = changed(full, offload="auto")
    for memory, level in ((none, "none"), (optimizer, "optimizer"), (activations, "activations")):
        assert settled(automatic, memory.peak + RESERVE).trainer.offload == level
    assert settled(automatic, None).trainer.offload == "none"
    assert settled(full, GIB) is full
    with pytest.raises(ValueError, match=r"predicted not to fit devices of .* GiB: trainer.micro_batch_size = "):
        settled(automatic, activations.peak + RESERVE - GIB)

    shared = changed(full, world_size=4, sharding="replicate", mesh=MeshPart(sequence="auto"))
    peaks = [
        trainer_memory(changed(shared, mesh=MeshPart(sequence=degree)), facts).peak + RESERVE for degree in (1, 2, 4)
    ]
    assert peaks == sorted(peaks, reverse=True)
    for peak, degree in zip(peaks, (1, 2, 4), strict=True):
        assert settled(shared, peak, [1, 2, 4]).trainer.mesh.sequence == degree
    both = changed(shared, offload="auto")
    assert settled(both, none.peak + RESERVE, [1, 2]).trainer == both.trainer.model_copy(
        update={"offload": "none", "mesh": MeshPart(sequence=1)}
    )
    assert settled(shared, None, [1, 2]).trainer.mesh.sequence == 1


def test_advice_combines_changes_where_no_single_one_is_enough(eager: tuple[JobSpec, Facts]) -> None:
    spec, facts = eager
    greedy = changed(spec, gradient_checkpointing="none", mode="full")

    advice = advise(greedy, replace(facts, trained=facts.params), 22 * GIB)

    assert advice[0].startswith('trainer: trainer.gradient_checkpointing = "full", trainer.micro_batch_size = 1, ')
    assert "rollout: weights and one row need" in advice[1]


def test_gradients_of_rewards_are_counted_as_the_trainer_keeps_them(
    eager: tuple[JobSpec, Facts], tmp_path: Path
) -> None:
    """Two noise levels of 4 × 8 samples in 1,024 × 64 latents, of the steps since the older of two checkpoints."""
    changes = ("rewards.judge.weight=1", "algorithm.name=srpo", "algorithm.num_noise_levels=2")
    sizes = ("rollout.prompts_per_step=4", "rollout.group_size=8")
    saves = ("schedule.save_every=5", "schedule.keep_last=2")
    table = {"model": {"path": "m"}, "data": {"train": "x"}, "rewards": {}}
    spec = parse_job(changed_job(table, [*changes, *sizes, *saves], []))
    GradientStore(tmp_path, 0, "abc").put("0-0-0", RowGradient(torch.zeros(1024, 64), 0.0))
    (file,) = tmp_path.rglob("*.safetensors")
    rows = 10 * 4 * 8 * 2
    assert work(spec, eager[1], 128).gradient_bytes == pytest.approx(rows * file.stat().st_size, rel=0.002)
    assert work(eager[0], eager[1], 128).gradient_bytes == 0


def test_work_of_the_reference_recipe(full_size: Path) -> None:
    recipe = Path("recipes/qwen_image_ocr_lora.toml")
    spec = prepare_job(recipe, [f"model.path={full_size}", "trainer.compile=false"], same_machine=True)
    work = predict(spec).work

    adapter = 60 * 64 * (8 * 2 * 3072 + 4 * 5 * 3072)
    assert work.samples == 512
    assert work.published_bytes == 2 * adapter
    assert work.checkpoint_bytes == 12 * adapter
    embeds = 32 * 128 * (3584 * 2 + 1)
    assert work.trajectory_bytes == 512 * 3 * 1024 * 64 * 4 + embeds
    assert work.gradient_bytes == 0
    forward, own = 16.647e12, 2 * (adapter / 2) * (1024 + 128)  # half of the adapter sees pictures, half text
    row = 2 * (2 * forward + 3 * own + (forward + own) / 2)  # guided; every second row's old log-prob is recomputed
    assert work.train_flops_per_sample == pytest.approx(2 * row, rel=0.01)
    assert work.rollout_flops_per_sample == pytest.approx(20 * (forward + own), rel=0.02)


def test_a_device_smaller_than_what_is_not_for_tensors_is_refused(tiny_qwen_image: Path) -> None:
    with pytest.raises(ValueError, match="give more than 2"):
        predict(lora_spec(tiny_qwen_image), device_memory_gib=1.5)


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    with pytest.raises(ValueError, match="cannot be loaded"):
        predict(lora_spec(tmp_path))


@pytest.mark.parametrize("samples", ["idle", "only"])
def test_a_trainer_that_samples_holds_a_replicas_other_models_as_well(
    eager: tuple[JobSpec, Facts], samples: str
) -> None:
    spec, facts = eager
    sampling = changed(spec, samples=samples)
    before, after = trainer_memory(spec, facts), trainer_memory(sampling, facts)
    added = facts.text_encoder_bytes + facts.vae_bytes + 2 * facts.trained
    assert after.parts["as a replica"] == added == after.update_peak - before.update_peak
    assert after.optimizer_peak - before.optimizer_peak == added
    assert before.sampling_peak == 0 < after.sampling_peak < after.update_peak
    assert (rollout_memory(sampling, facts).peak == 0) == (samples == "only")
    assert advise(sampling, facts, after.peak - 1) == []  # the text encoder lies in host memory
    limit = before.peak + 1
    assert f'trainer: trainer.samples = "no" needs {before.peak / GIB:.0f} GiB' in advise(sampling, facts, limit)
