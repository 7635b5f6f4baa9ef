"""What goes with what: every algorithm as it comes, every combination that cannot work, and what a name fills in."""

import tomllib
from itertools import product
from pathlib import Path
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


REFUSED = tomllib.loads(Path(__file__).with_name("refused.toml").read_text())


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_names_its_setting_and_the_change(name: str) -> None:
    parts = dict(REFUSED[name])
    start, change = parts.pop("problem").split(" … ")
    problem = problem_of(**parts)
    assert problem.startswith(start)
    assert change in problem


ALLOWED: dict[str, dict[str, Parts]] = {
    "limits in nats alone": {"algorithm": {"clip_nats": 0.66}},
    "guard on DanceGRPO's steps": {"algorithm": {"name": "grpo_guard"}, "rollout": {"noise": {"type": "dance_sde"}}},
    "Flow-DPPO on cps": {"algorithm": {"name": "flow_dppo"}, "rollout": {"noise": {"type": "cps"}}},
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
