"""What goes with what: every algorithm as it comes, every combination that cannot work, and what a name fills in."""

from itertools import product
from typing import Any

import pytest

from flowfleet.algorithms.registry import ALGORITHMS, LOSSES, Algorithm, Loss, register_algorithm, register_loss
from flowfleet.algorithms.settings import AdvantageSettings
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.models.settings import Size
from tests.e2e.matrix.choice import least_settings

Parts = dict[str, Any]


def spec_of(**parts: Parts) -> JobSpec:
    base: Parts = {"model": {"path": "model"}, "data": {"train": "prompts.txt"}, "rewards": {"ocr": {}}}
    return parse_job(base | parts)


def problem_of(**parts: Parts) -> str:
    with pytest.raises(ValueError, match=r"\w") as caught:
        spec_of(**parts)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_works_as_it_comes_and_survives_storage(name: str) -> None:
    spec = spec_of(algorithm={"name": name, **least_settings(ALGORITHMS[name])})
    assert spec.loss.name == ALGORITHMS[name].loss
    assert parse_job(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(("name", "loss"), list(product(sorted(ALGORITHMS), sorted(LOSSES))))
def test_another_loss_works_or_is_refused_for_a_reason_of_its_own(name: str, loss: str) -> None:
    """Never for a setting that the job did not write."""
    algorithm, chosen = ALGORITHMS[name], LOSSES[loss]
    needed = {} if chosen.traits.reads_rewards else {"teachers": {"one": {"adapter": "job:ID"}}}
    parts: dict[str, Parts] = {"algorithm": {"name": name, "loss": loss, **needed}}
    is_ode = algorithm.defaults.get("rollout.noise.eta") == 0.0
    if algorithm.data == "preferences" and not chosen.needs_pairs:
        assert "rollout.noise.eta" in problem_of(**parts) or "learns from pairs" in problem_of(**parts)
    elif is_ode and chosen.kind in ("policy", "distillation"):
        assert problem_of(**parts).startswith("rollout.noise.eta = 0")
    elif algorithm.defaults.get("rollout.noise.type") == "cps" and chosen.needs_gaussian:
        assert "set that to sde or dance_sde" in problem_of(**parts)
    else:
        spec = spec_of(**parts)
        assert parse_job(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_setting_of_another_loss_is_unknown_and_says_whose_it_is(name: str) -> None:
    algorithm = next(one.name for one in ALGORITHMS.values() if one.loss == name)
    every = {key: loss.name for loss in LOSSES.values() for key in loss.model.model_fields}
    for key in every.keys() - LOSSES[name].model.model_fields.keys():
        problem = problem_of(algorithm={"name": algorithm, key: 1})
        suited = [loss for loss in LOSSES.values() if loss.model.reads(key)]
        assert f"algorithm.{key} has no effect with algorithm.loss = {name}: leave it out, or use" in problem
        assert any(loss.name in problem.rpartition("or use ")[2].split(", ") for loss in suited)


def test_a_name_fills_in_what_the_job_leaves_out() -> None:
    dance = spec_of(algorithm={"name": "dance_grpo"}, rollout={"noise": {"eta": 0.9}})
    assert (dance.rollout.noise.type, dance.rollout.noise.eta) == ("dance_sde", 0.9)
    assert dance.rollout.noise.share_initial_noise
    algorithm: Any = dance.algorithm
    assert (algorithm.advantage_std, algorithm.clip_range) == ("group", 1e-4)
    mix = spec_of(algorithm={"name": "mix_grpo"}).rollout.window
    assert (mix.strategy, mix.size, mix.stride, mix.shift_every) == ("progressive", 4, 1, 25)
    guard: Any = spec_of(algorithm={"name": "grpo_guard"}).algorithm
    assert (guard.clip_range, guard.advantage_std) == (2e-6, "group")  # as in all of its authors' configurations
    assert spec_of(algorithm={"name": "flow_dppo"}).algorithm.of(AdvantageSettings).advantage_clamp is None
    assert spec_of(algorithm={"name": "diffusion_nft"}).rollout.noise.eta == 0
    assert spec_of(algorithm={"name": "dpo"}).rollout.group_size == 2


def test_a_loss_that_the_job_chose_brings_its_own_limits() -> None:
    spec = spec_of(algorithm={"name": "dance_grpo", "loss": "grpo_guard"})
    algorithm: Any = spec.algorithm
    assert algorithm.clip_range == 2e-6  # not DanceGRPO's, which is of another ratio
    assert (spec.rollout.noise.type, algorithm.advantage_std) == ("dance_sde", "group")


TEACHER = {"one": {"adapter": "job:ID"}}
SOURCES = [{"name": "signs", "path": "a.txt"}, {"name": "scenes", "path": "b.txt"}]
CPS = {"noise": {"type": "cps", "eta": 0.8}}
REFUSED: dict[str, tuple[dict[str, Parts], str, str]] = {
    # A trainer that samples
    "a full trainer that samples": (
        {"trainer": {"samples": "idle", "mode": "full"}},
        'trainer.samples = "idle"',
        'set trainer.mode = "lora"',
    ),
    "ranks that hold a share of the base each": (
        {"trainer": {"samples": "only", "world_size": 2, "sharding": "fsdp"}},
        'trainer.samples = "only"',
        'set that to "auto"',
    ),
    "a trainer alone that is not on-policy": (
        {"trainer": {"samples": "only"}, "schedule": {"max_staleness": 1}},
        'trainer.samples = "only"',
        "schedule.max_staleness = 1",
    ),
    # Windows and steps
    # Previews
    "previews that choose everything": (
        {"rollout": {"group_size": 4, "preview": {"keep": 4, "num_inference_steps": 4}}},
        "rollout.preview.keep = 4 leaves out no sample",
        "rollout.group_size",
    ),
    "previews as dear as samples": (
        {"rollout": {"preview": {"keep": 4}}},
        "rollout.preview makes every sample twice",
        "below rollout.num_inference_steps = 10",
    ),
    "previews of as many steps": (
        {"rollout": {"preview": {"keep": 4, "num_inference_steps": 10}}},
        "rollout.preview.num_inference_steps = 10 saves nothing",
        "below rollout.num_inference_steps = 10",
    ),
    "float8 previews of float8 samples": (
        {
            "algorithm": {"name": "diffusion_nft"},
            "rollout": {
                "quantization": "fp8",
                "preview": {"keep": 4, "num_inference_steps": 4, "quantization": "fp8"},
            },
        },
        "rollout.preview.quantization has no effect",
        "leave it out",
    ),
    "float8 previews of a merged adapter": (
        {"rollout": {"adapter": "merged", "preview": {"keep": 4, "quantization": "fp8"}}},
        'rollout.adapter = "merged" keeps one rounding',
        '"separate"',
    ),
    "steps of no previews": (
        {"rollout": {"preview": {"num_inference_steps": 4}}},
        "rollout.preview.num_inference_steps has no effect",
        "without rollout.preview.keep",
    ),
    "previews of a group that shares its noise": (
        {"rollout": {"preview": {"keep": 4, "num_inference_steps": 4}, "noise": {"share_initial_noise": True}}},
        "rollout.noise.share_initial_noise makes all previews of a group the same",
        "set it to false",
    ),
    "batches that previews thin out": (
        {"rollout": {"preview": {"keep": 4, "num_inference_steps": 4}}, "trainer": {"deterministic": True}},
        "trainer.deterministic repeats the rollout's batches",
        "rollout.preview",
    ),
    "previews next to a teacher": (
        {
            "algorithm": {"name": "diffusion_opd", "teachers": TEACHER},
            "rollout": {"preview": {"keep": 4, "num_inference_steps": 4}},
        },
        "rollout.preview.keep = 4 chooses by rewards",
        "leave it out",
    ),
    "previews of given pairs": (
        {"algorithm": {"name": "dpo"}, "rollout": {"preview": {"keep": 2, "num_inference_steps": 4}}, "rewards": {}},
        "rollout.preview.keep = 2 has no effect with algorithm.name = dpo",
        "samples nothing",
    ),
    "best of fewer than previews leave": (
        {"algorithm": {"best_of": 4}, "rollout": {"preview": {"keep": 4, "num_inference_steps": 4}}},
        "algorithm.best_of = 4 leaves out no sample of a group of 4",
        "rollout.preview.keep",
    ),
    # Teachers
    "a distillation without a teacher": (
        {"algorithm": {"name": "diffusion_opd"}},
        "algorithm.loss = diffusion_opd learns from teachers",
        "algorithm.teachers.NAME.adapter",
    ),
    "teachers of a policy without adapter": (
        {"algorithm": {"name": "diffusion_opd", "teachers": TEACHER}, "trainer": {"mode": "full"}},
        "algorithm.loss = diffusion_opd compares adapters",
        'set trainer.mode = "lora"',
    ),
    "teachers of steps that are not stored": (
        {"algorithm": {"name": "diffusion_opd", "teachers": TEACHER}, "rollout": {"noise": {"eta": 0.0}}},
        "rollout.noise.eta = 0",
        "give an eta above 0",
    ),
    "a teacher of a source that is none": (
        {"algorithm": {"name": "diffusion_opd", "teachers": {"one": {"adapter": "a", "sources": ["signs"]}}}},
        "algorithm.teachers.one.sources",
        "it has: none",
    ),
    "two teachers of one file": (
        {"algorithm": {"name": "diffusion_opd", "teachers": {"one": {"adapter": "a"}, "two": {"adapter": "b"}}}},
        "algorithm.teachers one and two both teach the prompts of data.train",
        "algorithm.teachers.two.sources",
    ),
    "two teachers of one source": (
        {
            "algorithm": {
                "name": "diffusion_opd",
                "teachers": {"one": {"adapter": "a"}, "two": {"adapter": "b", "sources": ["signs"]}},
            },
            "data": {"train": None, "sources": SOURCES},
        },
        "algorithm.teachers one and two both teach the prompts of the source 'signs'",
        "algorithm.teachers.two.sources",
    ),
    "a source without a teacher": (
        {
            "algorithm": {"name": "diffusion_opd", "teachers": {"one": {"adapter": "a", "sources": ["signs"]}}},
            "data": {"train": None, "sources": SOURCES},
        },
        "algorithm.teachers: no teacher has the prompts of the source 'scenes'",
        "name it in the `sources`",
    ),
    "held-out prompts that nothing scores": (
        {
            "algorithm": {"name": "diffusion_opd", "teachers": TEACHER},
            "rewards": {},
            "data": {"train": "a.txt", "validation": "b.txt"},
        },
        "rewards: name at least one reward service",
        "[rewards.ocr]",
    ),
    "a correction of ratios that are none": (
        {"rollout": CPS, "algorithm": {"correction": {"mode": "truncated"}}},
        "algorithm.correction.mode",
        'set it to "none"',
    ),
    "a bound without bound": ({"algorithm": {"clip_nats": float("inf")}}, "algorithm.clip_nats", "finite"),
    "window beyond the schedule": (
        {"rollout": {"window": {"high": 11}}},
        "rollout.window.high = 11",
        "num_inference_steps = 10",
    ),
    "window too large": ({"rollout": {"window": {"size": 10}}}, "rollout.window.size = 10", "lower it"),
    "window without steps": (
        {"rollout": {"window": {"strategy": "all", "low": 9}}},
        "rollout.window.low = 9",
        "lower it",
    ),
    "stride of a random window": (
        {"rollout": {"window": {"stride": 2}}},
        "rollout.window.stride has no effect",
        '"progressive"',
    ),
    "pace of an average that is not kept": (
        {"trainer": {"ema": {"every": 8}}},
        "trainer.ema.every has no effect",
        "trainer.ema.decay",
    ),
    "pace of a fixed window": (
        {"rollout": {"window": {"strategy": "fixed", "shift_every": 9}}},
        "rollout.window.shift_every has no effect",
        '"progressive"',
    ),
    "a list of no window": (
        {"rollout": {"window": {"steps": [1, 2]}}},
        "rollout.window.steps has no effect",
        'use "listed"',
    ),
    "an empty list": (
        {"rollout": {"window": {"strategy": "listed"}}},
        'rollout.window.strategy = "listed"',
        "[0, 2, 5]",
    ),
    "a list beyond the schedule": (
        {"rollout": {"window": {"strategy": "listed", "steps": [0, 10]}}},
        "rollout.window.steps = [0, 10]",
        "from 0 to 9",
    ),
    "a list backwards": (
        {"rollout": {"window": {"strategy": "listed", "steps": [2, 1]}}},
        "rollout.window.steps = [2, 1]",
        "ascending",
    ),
    "cps at the last step of a list": (
        {"rollout": CPS | {"window": {"strategy": "listed", "steps": [0, 9]}}},
        "rollout.window.steps: the last step",
        "leave out step 9",
    ),
    "a range of a list": (
        {"rollout": {"window": {"strategy": "listed", "steps": [1], "high": 5}}},
        "rollout.window.high has no effect",
        "leave it out",
    ),
    "a size of a fraction": (
        {"rollout": {"window": {"strategy": "fraction", "size": 3}}},
        "rollout.window.size has no effect",
        '"random"',
    ),
    "a fraction of no fraction": (
        {"rollout": {"window": {"fraction": 0.5}}},
        "rollout.window.fraction has no effect",
        'use "fraction"',
    ),
    "a fraction of steps that nothing trains on": (
        {
            "algorithm": {"name": "diffusion_nft"},
            "rollout": {"noise": {"eta": 0.5}, "window": {"strategy": "fraction"}},
        },
        'rollout.window.strategy = "fraction" has no effect',
        'use "all"',
    ),
    "a decay of a random window": (
        {"rollout": {"window": {"pace": "decay"}}},
        "rollout.window.pace has no effect",
        '"progressive"',
    ),
    "a rate of no decay": (
        {"algorithm": {"name": "mix_grpo"}, "rollout": {"window": {"pace": "decay", "pace_rate": 0.5}}},
        "rollout.window.pace_rate has no effect",
        '"exp_decay"',
    ),
    "a decay that grows": (
        {"algorithm": {"name": "mix_grpo"}, "rollout": {"window": {"pace": "decay", "pace_min": 26}}},
        "rollout.window.pace_min = 26",
        "lower it",
    ),
    "a stay of a random window": (
        {"rollout": {"window": {"at_end": "stay"}}},
        "rollout.window.at_end has no effect",
        '"progressive"',
    ),
    "a shift of nothing": ({"rollout": {"shift": 0.0}}, "rollout.shift", "greater than 0"),
    "cps with too much noise": (
        {"rollout": {"noise": {"type": "cps", "eta": 1.2}}},
        "rollout.noise.eta = 1.2",
        "at most 1",
    ),
    "cps at the last step": (
        {"rollout": CPS | {"window": {"high": 10}}},
        "rollout.window.high = 10",
        "to at most 9",
    ),
    "an ODE for a policy loss": (
        {"rollout": {"noise": {"eta": 0.0}}},
        "rollout.noise.eta = 0",
        "choose algorithm.loss from awm, crd, dgpo, diffusion_nft, dpo, elbo_pg",
    ),
    "one sample in many copies": (
        {"algorithm": {"name": "diffusion_nft"}, "rollout": {"noise": {"share_initial_noise": True}}},
        "rollout.noise.share_initial_noise",
        "set the one to false",
    ),
    "log-probs that are not Gaussian": (
        {"algorithm": {"name": "grpo_guard"}, "rollout": CPS},
        "algorithm.loss = grpo_guard",
        "set that to sde or dance_sde",
    ),
    # Samplers
    "a sampler of an ODE for noisy steps": (
        {"rollout": {"sampler": "dpm_solver_2"}},
        'rollout.sampler = "dpm_solver_2" takes no noise',
        "set rollout.noise.eta = 0",
    ),
    "a tail of an ODE": (
        {"algorithm": {"name": "diffusion_nft"}, "rollout": {"tail_steps": 3}},
        "rollout.tail_steps has no effect",
        'use rollout.sampler = "dpm_solver_2"',
    ),
    "a tail that saves nothing": (
        {"algorithm": {"name": "mix_grpo"}, "rollout": {"tail_steps": 6}},
        "rollout.tail_steps = 6 is no fewer than the 6 steps",
        "lower it",
    ),
    "a tail of a window to the end": (
        {"rollout": {"tail_steps": 1, "window": {"strategy": "all"}}},
        "rollout.tail_steps = 1 is no fewer than the 1 steps",
        "leave it out",
    ),
    "a sampler of no validation": (
        {"schedule": {"validation_sampler": "dpm_solver_2"}},
        "schedule.validation_sampler has no effect",
        "leave it out",
    ),
    "a size of no validation": (
        {"schedule": {"validation_width": 1024}},
        "schedule.validation_width has no effect",
        "leave it out",
    ),
    # Settings of a loss
    "beta of another loss": (
        {"algorithm": {"name": "diffusion_nft", "beta": 500.0}},
        "algorithm.beta",
        "less than or equal to 1",
    ),
    "two clip ranges": (
        {"algorithm": {"clip_range": 1e-4, "clip_nats": 0.5}},
        "algorithm.clip_range has no effect",
        "remove one of them",
    ),
    "noise levels the wrong way round": (
        {"algorithm": {"name": "diffusion_nft", "sigma_low": 0.7, "sigma_high": 0.6}},
        "algorithm.sigma_low = 0.7",
        "below algorithm.sigma_high = 0.6",
    ),
    "bounds of the sampler's levels": (
        {"algorithm": {"name": "diffusion_nft", "sigma_sampling": "schedule", "sigma_low": 0.1}},
        "algorithm.sigma_low has no effect",
        "the sampler's levels",
    ),
    "more levels than the sampler has": (
        {"algorithm": {"name": "diffusion_nft", "sigma_sampling": "schedule", "num_noise_levels": 11}},
        "algorithm.num_noise_levels = 11",
        "lower it",
    ),
    "a moving reference without a KL": (
        {"algorithm": {"kl_reference": {"every": 15}}},
        "algorithm.kl_reference has no effect without algorithm.kl_coef",
        "give that a value above 0",
    ),
    "a moving reference of a loss that prefers by it": (
        {"algorithm": {"name": "dgpo", "kl_coef": 0.1, "kl_reference": {"every": 15}}},
        "algorithm.kl_reference moves what algorithm.loss = dgpo prefers samples by",
        "choose another loss",
    ),
    "a gate by no reward": (
        {"algorithm": {"kl_coef": 0.1, "kl_gate": {"rewards": ["taste"]}}},
        'algorithm.kl_gate.rewards names "taste"',
        "give [rewards.taste] with weight = 0",
    ),
    "diversity by no reward": (
        {"algorithm": {"diversity": "far"}},
        'algorithm.diversity names "far", which is no reward of the job',
        "give [rewards.far] with weight = 0",
    ),
    "diversity by a reward that counts": (
        {"algorithm": {"diversity": "ocr"}},
        "algorithm.diversity names rewards.ocr, which counts",
        "set rewards.ocr.weight = 0",
    ),
    "a micro-batch that cannot hold a group": (
        {"algorithm": {"name": "dgpo"}, "trainer": {"micro_batch_size": 8}},
        "trainer.micro_batch_size = 8 cannot hold a group",
        "raise it to rollout.group_size = 16",
    ),
    "more updates than groups": (
        {"algorithm": {"name": "crd"}, "rollout": {"prompts_per_step": 2}, "trainer": {"updates_per_step": 3}},
        "trainer.updates_per_step = 3 is more than the 2 groups",
        "lower it",
    ),
    # Corrections
    "bypass without means": (
        {"algorithm": {"name": "flow_dppo", "old_log_probs": "rollout"}},
        "algorithm.loss = flow_dppo",
        '"first_forward" or "recompute"',
    ),
    "bounds of no correction": (
        {"algorithm": {"correction": {"high": 3.0}}},
        "algorithm.correction.high has no effect",
        "choose a mode",
    ),
    "lower bound of a truncation": (
        {"algorithm": {"correction": {"mode": "truncated", "low": 0.9}}},
        "algorithm.correction.low has no effect",
        "choose a mode",
    ),
    # Pairs
    "preferences without pairs": (
        {"algorithm": {"name": "dpo", "loss": "diffusion_nft"}},
        "algorithm.name = dpo",
        "its loss must be one of dpo",
    ),
    "preferences of three": (
        {"algorithm": {"name": "dpo"}, "rollout": {"group_size": 3}},
        "algorithm.name = dpo",
        "leave rollout.group_size at 2",
    ),
    "more pairs than samples": (
        {"algorithm": {"name": "online_dpo", "pairs_per_group": 9}},
        "algorithm.pairs_per_group = 9",
        "at least 18, not 16",
    ),
    "half a pair": (
        {"algorithm": {"name": "online_dpo"}, "trainer": {"micro_batch_size": 1}},
        "trainer.micro_batch_size = 1",
        "give 2",
    ),
    "compiled and deterministic": (
        {"trainer": {"compile": True, "deterministic": True}},
        "trainer.deterministic",
        "set trainer.compile or",
    ),
    "replicas of full weights": (
        {"trainer": {"mode": "full", "sharding": "replicate", "world_size": 2}},
        'trainer.sharding = "replicate" with trainer.mode = "full"',
        'set it to "auto" or "fsdp"',
    ),
    "full weights on a quantized base": (
        {"model": {"path": "m", "base": "fp8"}, "trainer": {"mode": "full"}},
        'model.base = "fp8" is a frozen base',
        'set trainer.mode = "lora"',
    ),
    "a quantized base in float32": (
        {"model": {"path": "m", "base": "fp8", "dtype": "float32"}},
        'model.base = "fp8" works on models in bfloat16',
        "set model.dtype",
    ),
    "a quantized base in shards": (
        {"model": {"path": "m", "base": "fp8"}, "trainer": {"sharding": "fsdp", "world_size": 2}},
        'model.base = "fp8" is whole on every rank',
        'set trainer.sharding to "auto"',
    ),
    "a quantized base and the rollout's log-probs": (
        {"model": {"path": "m", "base": "fp8"}, "algorithm": {"old_log_probs": "rollout"}},
        'algorithm.old_log_probs = "rollout" with model.base = "fp8"',
        'set algorithm.old_log_probs to "first_forward" or "recompute"',
    ),
    "a quantized base in quantized rollouts": (
        {"model": {"path": "m", "base": "fp8"}, "rollout": {"quantization": "fp8"}},
        "rollout.quantization has no effect",
        "leave it out",
    ),
    "a merged adapter of full weights": (
        {"rollout": {"adapter": "merged"}, "trainer": {"mode": "full"}},
        "rollout.adapter has no effect",
        "leave it out",
    ),
    "a merged adapter and the rollout's log-probs": (
        {"rollout": {"adapter": "merged"}, "algorithm": {"old_log_probs": "rollout"}},
        'algorithm.old_log_probs = "rollout" with rollout.adapter = "merged"',
        'set algorithm.old_log_probs to "first_forward" or "recompute"',
    ),
    "a merged adapter and deterministic": (
        {"rollout": {"adapter": "merged"}, "trainer": {"deterministic": True}},
        "trainer.deterministic",
        'set rollout.adapter = "separate"',
    ),
    "quantized training of an adapter": (
        {"trainer": {"quantization": "fp8"}},
        'trainer.quantization = "fp8" is for full training',
        'set model.base = "fp8"',
    ),
    "quantized training in float16": (
        {"model": {"path": "m", "dtype": "float16"}, "trainer": {"mode": "full", "quantization": "fp8"}},
        'trainer.quantization = "fp8" works on models in bfloat16',
        "set model.dtype",
    ),
    "quantized training and the rollout's log-probs": (
        {"trainer": {"mode": "full", "quantization": "fp8"}, "algorithm": {"old_log_probs": "rollout"}},
        'algorithm.old_log_probs = "rollout" with trainer.quantization = "fp8"',
        'or rollout.quantization to "fp8"',
    ),
    "quantized training and deterministic": (
        {"trainer": {"mode": "full", "quantization": "fp8", "deterministic": True}},
        "trainer.deterministic",
        'rollout.quantization = "fp8"',
    ),
    "quantized rollouts and deterministic": (
        {"rollout": {"quantization": "fp8"}, "trainer": {"deterministic": True}},
        "trainer.deterministic",
        'rollout.quantization = "none"',
    ),
    "compiled rollouts and deterministic": (
        {"rollout": {"compile": True}, "trainer": {"deterministic": True}},
        "trainer.deterministic",
        "rollout.compile = false",
    ),
    "a limit on a gap that is not measured": (
        {"algorithm": {"name": "diffusion_nft"}, "rollout": {"max_log_prob_gap": 1e-4}},
        "rollout.max_log_prob_gap has no effect",
        "leave it out",
    ),
    "a disagreement between validations that there are not": (
        {"rewards": {"ocr": {}, "people": {"weight": 0.0}}, "schedule": {"max_disagreement": 0.5}},
        "schedule.max_disagreement compares validations",
        "give data.validation",
    ),
    "a drop between validations that there are not": (
        {"schedule": {"max_reward_drop": 0.5}},
        "schedule.max_reward_drop compares validations",
        "give data.validation",
    ),
    "a drop of a reward that counts for nothing": (
        {
            "algorithm": {"name": "dpo"},
            "data": {"train": "pairs.jsonl", "validation": "held_out.txt"},
            "rewards": {"ocr": {"weight": 0.0}},
            "schedule": {"max_reward_drop": 0.5},
        },
        "schedule.max_reward_drop has no reward to compare",
        "give one a weight",
    ),
    "a drop of totals that count otherwise": (
        {
            "data": {"train": "prompts.txt", "validation": "held_out.txt"},
            "rewards": {"ocr": {"curve": [[0, 1.0], [20, 2.0]]}},
            "schedule": {"max_reward_drop": 0.5},
        },
        "schedule.max_reward_drop compares the rewards of different steps",
        "leave one of them out",
    ),
    "a disagreement with nothing that is watched": (
        {
            "data": {"train": "prompts.txt", "validation": "held_out.txt"},
            "schedule": {"max_disagreement": 0.5},
        },
        "schedule.max_disagreement has nothing to compare",
        "weight = 0",
    ),
    "a disagreement of totals that count otherwise": (
        {
            "data": {"train": "prompts.txt", "validation": "held_out.txt"},
            "rewards": {"ocr": {"curve": [[0, 1.0], [20, 2.0]]}, "people": {"weight": 0.0}},
            "schedule": {"max_disagreement": 0.5},
        },
        "schedule.max_disagreement compares the rewards of different steps, and rewards.ocr.curve changes what they",
        "leave one of them out",
    ),
    "more updates than pairs": (
        {"algorithm": {"name": "online_dpo"}, "trainer": {"updates_per_step": 3}, "rollout": {"prompts_per_step": 2}},
        "trainer.updates_per_step = 3",
        "2 pairs",
    ),
    # Advantages and rewards
    "a group of one": ({"rollout": {"group_size": 1}}, "rollout.group_size = 1", "2 or more"),
    "normalized without a std": (
        {"algorithm": {"reward_combination": "normalized", "advantage_std": "none"}},
        'algorithm.advantage_std = "none" has no effect',
        "leave it out",
    ),
    "separate rewards without a std": (
        {"algorithm": {"reward_combination": "separate", "advantage_std": "none"}},
        'algorithm.reward_combination = "separate"',
        'set the one to "sum"',
    ),
    "the best of no more": (
        {"algorithm": {"best_of": 16}, "rollout": {"group_size": 16}},
        "algorithm.best_of = 16 leaves out no sample",
        "raise rollout.group_size",
    ),
    "the rollout's batches without some samples": (
        {"algorithm": {"best_of": 4}, "trainer": {"deterministic": True}},
        "trainer.deterministic repeats the rollout's batches",
        "leave algorithm.best_of out",
    ),
    "more updates than the best": (
        {
            "algorithm": {"best_of": 2},
            "rollout": {"prompts_per_step": 2, "group_size": 8},
            "trainer": {"updates_per_step": 5},
        },
        "trainer.updates_per_step = 5 is more than the 4 samples that a step trains on",
        "lower it",
    ),
    "the KL of full weights as a reward": (
        {"algorithm": {"kl_reward": 0.1}, "trainer": {"mode": "full"}},
        "algorithm.kl_reward",
        'trainer.mode = "lora", or use algorithm.kl_coef',
    ),
    "the KL of an ODE as a reward": (
        {"algorithm": {"name": "diffusion_nft", "kl_reward": 0.1}},
        "algorithm.kl_reward is measured at noisy steps",
        "an eta above 0",
    ),
    "the KL of given samples as a reward": (
        {"algorithm": {"name": "dpo", "kl_reward": 0.1}},
        "algorithm.kl_reward has no effect",
        "leave it out",
    ),
    "the KL with rewards that are not summed": (
        {"algorithm": {"kl_reward": 0.1, "reward_combination": "separate"}},
        "algorithm.kl_reward is subtracted from the sum",
        'set that to "sum"',
    ),
    "full fine-tuning from an adapter": (
        {"model": {"path": "m", "adapter": "a"}, "trainer": {"mode": "full"}},
        'model.adapter: trainer.mode = "full" has no adapter',
        "merged in, with diffusers, and give that as model.path",
    ),
    "no reward": ({"rewards": {}}, "rewards: name at least one", "[rewards.ocr]"),
    "rewards that count for nothing": ({"rewards": {"ocr": {"weight": 0.0}}}, "rewards.*.weight is 0", "a weight"),
    "a curve that counts for nothing": (
        {"rewards": {"ocr": {"curve": [[0, 0], [9, 0]]}}},
        "rewards.*.curve",
        "a factor",
    ),
    "a curve backwards": (
        {"rewards": {"ocr": {"curve": [[9, 1], [9, 0]]}}},
        "rewards.ocr.curve: steps 9, 9",
        "ascending",
    ),
    "a clip that leaves nothing": ({"rewards": {"ocr": {"clip": [1, 1]}}}, "rewards.ocr.clip: [1, 1] leaves", "lower"),
    "a clip of no weight": (
        {"rewards": {"ocr": {}, "b": {"weight": 0, "clip": [0, 1]}}},
        "rewards.b.clip has no effect",
        "leave it out",
    ),
    "a weight for what no training sample gets": (
        {"data": {"train": "p.txt", "validation": "v.txt"}, "rewards": {"ocr": {}, "b": {"held_out_only": True}}},
        "rewards.b.held_out_only leaves it no training sample to count for",
        "set its weight to 0",
    ),
    "held-out scores without held-out prompts": (
        {"rewards": {"ocr": {}, "b": {"weight": 0, "held_out_only": True}}},
        "rewards.b.held_out_only leaves it nothing to score",
        "give data.validation",
    ),
    "diversity of held-out samples": (
        {
            "data": {"train": "p.txt", "validation": "v.txt"},
            "algorithm": {"diversity": "b"},
            "rewards": {"ocr": {}, "b": {"weight": 0, "held_out_only": True}},
        },
        "rewards.b.held_out_only: the algorithm reads b of training samples",
        "leave it out",
    ),
    "a gate with two limits": (
        {"rewards": {"ocr": {"gate": {"below": 0, "above": 1}}}},
        "rewards.ocr.gate: a gate needs one limit",
        "`below` or `above`",
    ),
    "a gate without a limit": ({"rewards": {"ocr": {"gate": {}}}}, "rewards.ocr.gate: a gate", "`below` or `above`"),
    "a guard that may be skipped": (
        {"rewards": {"ocr": {}, "b": {"gate": {"below": 0}, "on_failure": "skip"}}},
        'rewards.b.on_failure = "skip" would open its gate',
        '"pause" or "drop"',
    ),
    "nothing left to continue with": (
        {"rewards": {"ocr": {"on_failure": "skip"}, "b": {"weight": 0}}},
        'rewards.ocr.on_failure = "skip" leaves no reward',
        '"pause" or "drop"',
    ),
    "an unknown policy": ({"rewards": {"ocr": {"on_failure": "zero"}}}, "rewards.ocr.on_failure", "'skip'"),
    "a reward beyond bounds": ({"rewards": {"ocr": {"weight": float("inf")}}}, "rewards.ocr.weight", "finite"),
    "more updates than samples": (
        {"trainer": {"updates_per_step": 9}, "rollout": {"prompts_per_step": 4, "group_size": 2}},
        "trainer.updates_per_step = 9",
        "8 samples",
    ),
    # Names
    "unknown algorithm": (
        {"algorithm": {"name": "flow_grop"}},
        "algorithm.name: 'flow_grop'",
        "did you mean flow_grpo?",
    ),
    "unknown loss": ({"algorithm": {"loss": "nft"}}, "algorithm.loss: 'nft'", "is not one of"),
    "unknown setting": ({"algorithm": {"clip": 1}}, "algorithm.clip: unknown setting", "did you mean"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_names_its_setting_and_the_change(name: str) -> None:
    parts, start, change = REFUSED[name]
    problem = problem_of(**parts)
    assert problem.startswith(start)
    assert change in problem


ALLOWED: dict[str, dict[str, Parts]] = {
    "limits in nats alone": {"algorithm": {"clip_nats": 0.66}},
    "guard on DanceGRPO's steps": {"algorithm": {"name": "grpo_guard"}, "rollout": {"noise": {"type": "dance_sde"}}},
    "Flow-DPPO on cps": {"algorithm": {"name": "flow_dppo"}, "rollout": CPS},
    "a window of an ODE": {"algorithm": {"name": "diffusion_nft"}, "rollout": {"window": {"size": 1}}},
    "DiffusionNFT on noisy samples": {"algorithm": {"name": "diffusion_nft"}, "rollout": {"noise": {"eta": 0.5}}},
    "DiffusionNFT's sampler": {"algorithm": {"name": "diffusion_nft"}, "rollout": {"sampler": "dpm_solver_2"}},
    "MixGRPO-Flash": {"algorithm": {"name": "mix_grpo"}, "rollout": {"num_inference_steps": 25, "tail_steps": 7}},
    "a sampler of validation alone": {
        "schedule": {"validation_sampler": "dpm_solver_2"},
        "data": {"train": "t.txt", "validation": "v.txt"},
    },
    "a size of validation alone": {
        "schedule": {"validation_height": 1024, "validation_width": 1024},
        "data": {"train": "t.txt", "validation": "v.txt"},
    },
    "every window of MixGRPO": {"algorithm": {"name": "mix_grpo"}, "rollout": {"window": {"strategy": "random"}}},
    "Flow-GRPO's average": {"trainer": {"ema": {"decay": 0.9, "every": 8}}},
    "DiffusionNFT without an average": {"algorithm": {"name": "diffusion_nft"}, "trainer": {"ema": {"decay": None}}},
    "all steps but some": {"rollout": {"window": {"strategy": "listed", "steps": [0, 3, 9]}}},
    "a share of all steps": {"rollout": {"window": {"strategy": "fraction", "fraction": 0.6}, "shift": 3.0}},
    "MixGRPO, decaying": {"algorithm": {"name": "mix_grpo"}, "rollout": {"window": {"pace": "decay", "pace_min": 1}}},
    "the sampler's levels": {
        "algorithm": {"name": "diffusion_nft", "sigma_sampling": "schedule", "num_noise_levels": 9}
    },
    "two steps": {"rollout": {"num_inference_steps": 2, "window": {"size": 1}}},
    "bypass": {"algorithm": {"old_log_probs": "rollout", "correction": {"mode": "truncated", "high": 3.0}}},
    "a reward that is only watched": {"rewards": {"ocr": {}, "quality": {"weight": 0.0}}},
    "one service twice, clipped, on a curve, with a guard": {
        "rewards": {
            "ocr": {"clip": [0, 0.9], "curve": [[0, 0], [10, 1]], "on_failure": "skip"},
            "strict": {"service": "ocr", "params": {"mode": "exact"}, "on_failure": "drop"},
            "quality": {"weight": 0.0, "gate": {"below": 0.2, "action": "mask"}},
        }
    },
    "normalized rewards, DanceGRPO's way": {"algorithm": {"name": "dance_grpo", "reward_combination": "normalized"}},
    "the best and worst of separate rewards, MixGRPO's and DanceGRPO's way": {
        "algorithm": {"reward_combination": "separate", "advantage_std": "group", "best_of": 8}
    },
    "a KL in the reward, of samples with noise": {"algorithm": {"kl_reward": 0.01}},
    "a KL in the reward, DiffusionNFT on an SDE": {
        "algorithm": {"name": "diffusion_nft", "kl_reward": 0.01},
        "rollout": {"noise": {"eta": 0.7}},
    },
    "a quantized base in ranks that sample": {
        "model": {"path": "m", "base": "fp8"},
        "trainer": {"samples": "only"},
        "schedule": {"max_staleness": 0},
    },
    "a merged adapter on a quantized base": {
        "model": {"path": "m", "base": "fp8"},
        "rollout": {"adapter": "merged", "compile": True},
    },
    "preferences without rewards": {"algorithm": {"name": "dpo"}, "rewards": {}},
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_works_is_not_refused(name: str) -> None:
    spec = spec_of(**ALLOWED[name])
    assert parse_job(spec.model_dump(mode="json")) == spec


def test_preferences_are_scored_only_for_validation() -> None:
    data = {"train": "pairs.jsonl", "validation": "held_out.txt"}
    assert problem_of(algorithm={"name": "dpo"}, rewards={}, data=data).startswith("rewards: name at least one")


def test_names_are_registered_once_and_losses_first() -> None:
    with pytest.raises(ValueError, match="registered already"):
        register_loss(Loss("flow_grpo", "m:f", "policy"))
    with pytest.raises(ValueError, match="registered already"):
        register_algorithm(Algorithm("flow_grpo", "", "", "", loss="flow_grpo"))
    with pytest.raises(ValueError, match="register that first"):
        register_algorithm(Algorithm("new", "", "", "", loss="none_such"))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_default_of_an_algorithm_is_a_setting(name: str) -> None:
    spec = spec_of(algorithm={"name": name, **least_settings(ALGORITHMS[name])})
    for path in ALGORITHMS[name].defaults:
        part: Any = spec
        for key in path.split("."):
            assert key in type(part).model_fields, path
            part = getattr(part, key)


def test_one_update_a_step_is_warned_of_where_a_limit_would_never_act() -> None:
    assert spec_of().trainer.updates_per_step == 2
    assert spec_of(algorithm={"name": "diffusion_nft"}).trainer.updates_per_step == 1
    assert spec_of(algorithm={"name": "online_dpo"}).trainer.updates_per_step == 1
    one = {"updates_per_step": 1}
    assert spec_of().warnings == spec_of(trainer=one | {"passes": 2}).warnings == []
    assert spec_of(algorithm={"name": "diffusion_nft"}).warnings == []
    assert spec_of(algorithm={"old_log_probs": "rollout"}, trainer=one).warnings == []  # the ratio to the rollout
    (warning,) = spec_of(trainer=one).warnings
    assert warning.startswith("algorithm.clip_range has no effect with one update a step")
    (warning,) = spec_of(trainer=one, algorithm={"clip_nats": 0.2, "clip_range_low": 1e-6}).warnings
    assert warning.startswith("algorithm.clip_range_low and algorithm.clip_nats have no effect")
    (warning,) = spec_of(trainer=one, algorithm={"name": "flow_dppo"}).warnings
    assert warning.startswith("algorithm.kl_threshold has no effect")


def test_a_loss_on_ratios_is_warned_of_samples_that_another_sampler_made() -> None:
    """A matching loss takes them as they are."""
    fp8: dict[str, Any] = {"quantization": "fp8"}
    (warning,) = spec_of(rollout=fp8).warnings
    assert warning.startswith('rollout.quantization = "fp8" samples another policy')
    assert warning.endswith("any sampler: awm, crd, dgpo, diffusion_nft, dpo, elbo_pg")
    (warning,) = spec_of(trainer=fp8 | {"mode": "full"}).warnings
    assert warning.startswith('rollout.quantization = "none" with trainer.quantization = "fp8" samples another policy')
    assert spec_of(trainer=fp8 | {"mode": "full"}, rollout=fp8).warnings == []
    assert spec_of(rollout=fp8 | {"max_log_prob_gap": 1e-3}).warnings == []
    assert spec_of(rollout=fp8, algorithm={"correction": {"mode": "truncated"}}).warnings == []
    for name in ("awm", "elbo_pg", "dgpo", "crd", "diffusion_nft"):
        assert spec_of(rollout=fp8, algorithm={"name": name}).warnings == []


def test_a_step_with_fewer_batches_than_updates_is_told() -> None:
    rollout = {"prompts_per_step": 12, "group_size": 12, "batch_size": 144}
    whole: Parts = {"rollout": rollout, "trainer": {"deterministic": True, "micro_batch_size": 144}}
    (warning,) = spec_of(**whole).warnings
    assert warning.startswith("trainer.updates_per_step = 2, and a step has 1 of the rollout's batches")
    assert "Lower trainer.micro_batch_size to 72 or less" in warning
    trainer = {"deterministic": True, "micro_batch_size": 72}
    assert spec_of(rollout=rollout, trainer=trainer).warnings == []
    assert spec_of(rollout=rollout, trainer={"micro_batch_size": 144}).warnings == [], "samples are split freely"
    assert spec_of(**whole, algorithm={"name": "diffusion_nft"}).warnings == [], "a loss on the final latents too"


def test_a_default_of_two_updates_gives_way_to_too_few_samples() -> None:
    """A loss on pairs may bring it: only what the job itself wrote is refused."""
    two = {"trainer.updates_per_step": 2}
    register_loss(Loss("pairwise", "no.module:none", "matching", needs_pairs=True, defaults=two))
    try:
        one_pair: Parts = {"algorithm": {"name": "online_dpo", "loss": "pairwise"}, "rollout": {"prompts_per_step": 1}}
        assert spec_of(**one_pair).trainer.updates_per_step == 2
        assert "trainer.updates_per_step = 3" in problem_of(**one_pair, trainer={"updates_per_step": 3})
    finally:
        del LOSSES["pairwise"]


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"optimizer": {"warmup_updates": 200}}, "not below the 200 updates"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(parts: Parts, problem: str) -> None:
    assert problem in problem_of(trainer=parts)


@pytest.mark.parametrize(
    ("correction", "old", "problem"),
    [
        ({"level": "sequence"}, "recompute", "level has no effect"),
        ({"mode": "truncated", "level": "sequence"}, "rollout", 'correction.level = "sequence" needs the log-probs'),
    ],
)
def test_a_correction_that_cannot_be_is_refused(correction: Parts, old: str, problem: str) -> None:
    assert problem in problem_of(algorithm={"correction": correction, "old_log_probs": old})


def test_an_evaluation_needs_prompts_and_no_training() -> None:
    assert problem_of(schedule={"steps": 0}).startswith("schedule.steps = 0 evaluates held-out prompts")
    data = {"train": "t.txt", "validation": "v.txt"}
    optimizer = {"warmup_updates": 5}
    found = spec_of(schedule={"steps": 0}, data=data, rewards={"ocr": {"weight": 0}}, trainer={"optimizer": optimizer})
    assert found.is_evaluation
    assert not spec_of().is_evaluation
    assert "data.validation" in problem_of(schedule={"validation_samples": 4})
    several = spec_of(schedule={"validation_samples": 3}, data=data, rollout={"batch_size": 7})
    assert several.held_out_per_request == 2
    assert spec_of(schedule={"validation_samples": 99}, data=data).held_out_per_request == 1


def test_larger_held_out_samples_come_in_smaller_requests() -> None:
    data, rollout = {"train": "t.txt", "validation": "v.txt"}, {"batch_size": 16, "height": 256, "width": 512}
    plain = spec_of(data=data, rollout=rollout)
    assert (plain.validation_size, plain.held_out_per_request) == (plain.rollout.size, 16)
    wide = spec_of(data=data, rollout=rollout, schedule={"validation_height": 512})
    assert (wide.validation_size, wide.held_out_per_request) == (Size(512, 512), 8)
    large = spec_of(data=data, rollout=rollout, schedule={"validation_height": 2048, "validation_width": 2048})
    assert large.held_out_per_request == 1
    small = spec_of(data=data, rollout=rollout, schedule={"validation_height": 64, "validation_width": 64})
    assert small.held_out_per_request == 16
    assert large.rollout.size == plain.rollout.size


def test_votes_without_another_guard_are_warned_of() -> None:
    (warning,) = spec_of(rewards={"taste": {"service": "human"}, "watched": {"weight": 0.0}}).warnings
    assert warning.startswith("rewards.taste: people's votes are the only guard")
    gate = {"weight": 0.0, "gate": {"below": 0.1}}
    assert spec_of(rewards={"human": {}, "image_quality": gate}).warnings == []
    assert spec_of(rewards={"human": {}, "ocr": {}}).warnings == []
    assert spec_of(rewards={"human": {}}, algorithm={"kl_coef": 0.01}).warnings == []
