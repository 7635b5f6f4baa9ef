"""Which settings of a job go with which others. Asked at submit, so that no trainer ever meets what cannot work.

`problems` refuses a job. `warnings` lets it run and is shown with it: what a published recipe may want all the same.

Each rule below gives the problems of one part of a job: a sentence that begins with a setting and says what to change.
A setting that nothing listens to is a problem only if the job changed it: what schema, algorithm or loss gave is not
the user's doing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm
from typing import TYPE_CHECKING

from flowfleet.algorithms.registry import LOSSES, STEPS
from flowfleet.algorithms.windows import default_end
from flowfleet.job.rules import distillation, gradients, previews, sequences
from flowfleet.job.rules.unheard import is_changed as _is_changed
from flowfleet.job.rules.unheard import unheard as _unheard

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec, RewardPart


def problems(job: JobSpec) -> Iterator[str]:
    """Everything that is wrong with a job's combination of settings, the plainest first."""
    for rule in (
        sequences.problems,
        gradients.problems,
        _evaluation,
        _window,
        _noise,
        _sampler,
        _guidance,
        _loss_settings,
        distillation.problems,
        previews.problems,
        _correction,
        _pairs,
        _advantages,
        _kl_reward,
        _adapter,
        _rewards,
        _sources,
        _batches,
        _sharding,
        _sampling_trainer,
        _base,
        _merged,
        _average,
        _optimizer,
        _best,
    ):
        yield from rule(job)


def warnings(job: JobSpec) -> Iterator[str]:
    """Settings that are valid but probably not intended, one sentence each."""
    idle = [name for name in _LIMITS if name in job.loss.reads and getattr(job.algorithm, name) is not None]
    idle = [name for name in idle if name not in _replaced(job)]
    if (
        job.loss.reads_log_probs
        and job.most_updates_per_step == 1
        and job.algorithm.old_log_probs != "rollout"
        and idle
    ):
        settings = " and ".join(f"algorithm.{name}" for name in idle)
        yield (
            f"{settings} {'have' if len(idle) > 1 else 'has'} no effect with one update a step, in which the policy is "
            "still the old one: set trainer.updates_per_step or trainer.passes to 2 or more"
        )
    yield from _other_numerics(job)
    yield from _lone_votes(job)


def _other_numerics(job: JobSpec) -> Iterator[str]:
    """Warns of samplers that compute another policy than the trainer, where the loss has a ratio to it. A loss without
    one takes samples of any sampler as they are."""
    rollout = job.rollout
    is_guarded = job.algorithm.correction.mode != "none" or rollout.max_log_prob_gap is not None
    if job.loss.kind != "policy" or is_guarded:
        return
    for name, usual in (("quantization", "none"), ("adapter", "separate")):
        if (value := getattr(rollout, name)) != usual:
            yield (
                f'rollout.{name} = "{value}" samples another policy than the one whose ratio algorithm.loss = '
                f"{job.loss.name} limits: set algorithm.correction.mode or rollout.max_log_prob_gap, or choose a loss "
                f"that takes samples of any sampler: {_names(kind='matching')}"
            )


def _lone_votes(job: JobSpec) -> Iterator[str]:
    """Warns where nothing but people's votes holds the policy."""
    votes = [name for name, part in job.rewards.items() if part.service_of(name) == VOTES]
    others = [part for name, part in job.rewards.items() if name not in votes]
    if votes and not job.algorithm.kl_coef and not any(part.gate or part.has_influence for part in others):
        yield (
            f"rewards.{votes[0]}: people's votes are the only guard of this job: add a reward with a gate, such as "
            "image_quality, or set algorithm.kl_coef"
        )


VOTES = "human"
"""Name of the reward service that people's votes are for."""
_NATS = {"clip_range": "clip_nats", "clip_range_low": "clip_nats_low", "kl_threshold": "kl_threshold_nats"}
"""Limits to the same ones in nats, which replace them."""
_LIMITS = (*_NATS, *_NATS.values())
"""Settings of `algorithm` that bound how far an update goes from the old policy."""


def _replaced(job: JobSpec) -> set[str]:
    return {plain for plain, nats in _NATS.items() if getattr(job.algorithm, nats) is not None}


def _evaluation(job: JobSpec) -> Iterator[str]:
    if job.is_evaluation and not job.data.is_validated:
        yield (
            "schedule.steps = 0 evaluates held-out prompts, and data.validation names none: give it a prompt file, or "
            "raise schedule.steps to train"
        )


def _window(job: JobSpec) -> Iterator[str]:
    rollout, window = job.rollout, job.rollout.window
    yield from _unheard_window(job)
    if rollout.noise.eta == 0 and not job.loss.from_steps:
        return
    if window.strategy == "listed":
        yield from _listed(job)
        return
    high = window_end(job)
    if high > rollout.num_inference_steps:
        yield f"rollout.window.high = {high} lies beyond rollout.num_inference_steps = {rollout.num_inference_steps}"
    elif window.low >= high:
        yield f"rollout.window.low = {window.low} leaves no step below {high}: lower it"
    elif window.strategy in _SIZED and window.low + window.size > high:
        yield (
            f"rollout.window.size = {window.size} does not fit into steps {window.low}…{high - 1}: lower it, or widen "
            "rollout.window.low and .high"
        )


_SIZED = ("fixed", "random", "progressive")
"""Strategies of windows that move or stand, of `rollout.window.size` steps."""


def _listed(job: JobSpec) -> Iterator[str]:
    steps, number = job.rollout.window.steps, job.rollout.num_inference_steps
    if not steps:
        yield 'rollout.window.strategy = "listed" needs rollout.window.steps, for example [0, 2, 5]'
    elif list(steps) != sorted(set(steps)) or steps[0] < 0 or steps[-1] >= number:
        yield f"rollout.window.steps = {list(steps)}: give ascending steps from 0 to {number - 1}, each once"


def _unheard_window(job: JobSpec) -> Iterator[str]:
    window = job.rollout.window
    where = f'with rollout.window.strategy = "{window.strategy}": leave it out, or use '
    readers: dict[str, tuple[str, ...]] = {
        "stride": ("progressive",),
        "shift_every": ("progressive",),
        "pace": ("progressive",),
        "at_end": ("progressive",),
        "steps": ("listed",),
        "fraction": ("fraction",),
    }
    if window.strategy in ("listed", "fraction"):
        readers["size"] = _SIZED
    if window.strategy == "listed":
        readers["low"] = readers["high"] = (*_SIZED, "all", "fraction")
    for name, strategies in readers.items():
        if window.strategy not in strategies:
            listening = " or ".join(f'"{strategy}"' for strategy in strategies)
            yield from _unheard(job, (f"rollout.window.{name}",), where + listening)
    if window.strategy == "fraction" and job.loss.kind == "matching" and job.rollout.noise.eta > 0:
        yield (
            f'rollout.window.strategy = "fraction" has no effect with algorithm.loss = {job.loss.name}, which trains '
            'on no noisy steps: use "all"'
        )
    for name, pace in (("pace_min", "decay"), ("pace_from", "exp_decay"), ("pace_rate", "exp_decay")):
        if window.strategy != "progressive" or window.pace != pace:
            yield from _unheard(
                job, (f"rollout.window.{name}",), f'without rollout.window.pace = "{pace}": leave it out'
            )
    if window.pace == "decay" and window.pace_min is not None and window.pace_min > window.shift_every:
        yield (
            f"rollout.window.pace_min = {window.pace_min} lies above rollout.window.shift_every = "
            f"{window.shift_every}, from which it falls: lower it"
        )


def _noise(job: JobSpec) -> Iterator[str]:
    noise, step, last = job.rollout.noise, job.step, job.rollout.num_inference_steps - 1
    if step.max_eta is not None and noise.eta > step.max_eta:
        yield f"rollout.noise.eta = {noise.eta}: {step.name} takes at most {step.max_eta:g}: lower it"
    if not step.noise_at_end and noise.eta > 0 and window_end(job) > last:
        ends = f"the last step ends at sigma 0, where {step.name} adds no noise and teaches nothing"
        if job.rollout.window.strategy == "listed":
            yield f"rollout.window.steps: {ends}; leave out step {last}"
        else:
            yield f"rollout.window.high = {window_end(job)}: {ends}; set rollout.window.high to at most {last}"
    if noise.eta == 0 and job.loss.kind == "policy":
        yield (
            f"rollout.noise.eta = 0 samples an ODE, which has no log-prob: give the loss {job.loss.name} an eta > 0, "
            f"or choose algorithm.loss from {_names(kind='matching')}"
        )
    if noise.eta == 0 and noise.share_initial_noise and job.method.data == "prompts":
        yield (
            "rollout.noise.share_initial_noise with rollout.noise.eta = 0 makes all samples of a group the same: set "
            "the one to false or the other above 0"
        )
    if not step.is_gaussian and noise.eta > 0 and job.loss.needs_gaussian:
        gaussian = " or ".join(known.name for known in STEPS.values() if known.is_gaussian)
        yield (
            f"algorithm.loss = {job.loss.name} needs Gaussian log-probs, which rollout.noise.type = {step.name} has "
            f"not: set that to {gaussian}"
        )


def _sampler(job: JobSpec) -> Iterator[str]:
    rollout, tail = job.rollout, job.rollout.tail_steps
    if rollout.sampler != "euler" and rollout.noise.eta > 0:
        yield (
            f'rollout.sampler = "{rollout.sampler}" takes no noise and has no log-prob: set rollout.noise.eta = 0 for '
            "a loss that needs none, or use rollout.tail_steps after the window, or schedule.validation_sampler for "
            "validation alone"
        )
    if tail is not None and rollout.noise.eta == 0:
        yield (
            'rollout.tail_steps has no effect with rollout.noise.eta = 0: use rollout.sampler = "dpm_solver_2" and '
            "fewer rollout.num_inference_steps"
        )
    elif tail is not None and tail >= (left := _steps_left(job)):
        yield (
            f"rollout.tail_steps = {tail} is no fewer than the {left} steps that rollout.window leaves after its noisy "
            "ones: lower it, or leave it out"
        )
    if not job.data.is_validated:
        settings = ("schedule.validation_sampler", "schedule.validation_samples")
        yield from _unheard(job, settings, "without data.validation: leave it out")


def _guidance(job: JobSpec) -> Iterator[str]:
    if not job.rollout.guidance.is_on and not job.writes_tokens:
        names = ("guidance_interval", "image_guidance_scale", "guidance_renorm")
        settings = tuple(f"rollout.{name}" for name in names)
        yield from _unheard(job, settings, "with rollout.guidance_scale = 1: raise that, or leave it out")


def _loss_settings(job: JobSpec) -> Iterator[str]:
    part, loss = job.algorithm, job.loss
    special = {name for known in LOSSES.values() for name in known.reads}
    for name in sorted(special - set(loss.reads)):
        readers = ", ".join(_readers(job, name))
        yield from _unheard(
            job, (f"algorithm.{name}",), f"with algorithm.loss = {loss.name}: leave it out, or use {readers}"
        )
    if loss.kind != "policy":
        yield from _unheard(
            job,
            ("algorithm.step_weights",),
            f"with algorithm.loss = {loss.name}, which is no policy loss: leave it out",
        )
    for name, greatest in sorted(loss.at_most.items()):
        value = getattr(part, name)
        if value > greatest:
            yield f"algorithm.{name} = {value} must be at most {greatest} with algorithm.loss = {loss.name}"
    for plain, nats in _NATS.items():
        if nats in loss.reads and getattr(part, nats) is not None:
            yield from _unheard(job, (f"algorithm.{plain}",), f"next to algorithm.{nats}: remove one of them")
    if "sigma_sampling" in loss.reads and part.sigma_sampling == "schedule":
        yield from _unheard(
            job,
            ("algorithm.sigma_low", "algorithm.sigma_high"),
            'with algorithm.sigma_sampling = "schedule", which has the sampler\'s levels: leave it out',
        )
        if part.num_noise_levels > job.rollout.num_inference_steps:
            yield (
                f"algorithm.num_noise_levels = {part.num_noise_levels} is more than the "
                f"{job.rollout.num_inference_steps} levels that the sampler has: lower it, or choose another "
                "algorithm.sigma_sampling"
            )
    elif "sigma_low" in loss.reads and part.sigma_low >= part.sigma_high:
        yield f"algorithm.sigma_low = {part.sigma_low} must lie below algorithm.sigma_high = {part.sigma_high}"
    if part.kl_coef == 0 or not loss.takes_kl:
        yield from _unheard(
            job,
            ("algorithm.kl_gate", "algorithm.kl_reference"),
            "without algorithm.kl_coef: give that a value above 0 and a loss that reads it, or leave it out",
        )
    if part.kl_gate.rewards and loss.kind == "sequence":
        yield f"algorithm.kl_gate has no effect with algorithm.loss = {loss.name}: leave it out"
    for name in part.kl_gate.rewards:
        yield from _watching(job, "algorithm.kl_gate.rewards", name)
    if part.kl_reference.moves and loss.needs_reference:
        yield (
            f"algorithm.kl_reference moves what algorithm.loss = {loss.name} prefers samples by: leave it out, or "
            "choose another loss"
        )
    if part.kl_coef > 0 and not loss.takes_kl:
        yield f"algorithm.kl_coef has no effect with algorithm.loss = {loss.name}, which holds to the reference by beta"


def _correction(job: JobSpec) -> Iterator[str]:
    part, loss, mode = job.algorithm, job.loss, job.algorithm.correction.mode
    if not loss.reads_log_probs:
        if mode != "none":
            yield (
                f'algorithm.correction.mode = "{mode}" corrects ratios, and algorithm.loss = {loss.name} has none: it '
                'takes samples of any sampler as they are; set it to "none"'
            )
        yield from _unheard(
            job,
            ("algorithm.old_log_probs", "rollout.max_log_prob_gap"),
            f"with algorithm.loss = {loss.name}, which reads no log-probs: leave it out",
        )
    elif part.old_log_probs == "rollout" and loss.needs_old_mean:
        yield (
            f"algorithm.loss = {loss.name} needs the old policy's means, which rollouts do not store: set "
            'algorithm.old_log_probs to "first_forward" or "recompute"'
        )
    if loss.kind == "policy" and mode != "none" and not job.step.is_gaussian:
        yield (
            f'algorithm.correction.mode = "{mode}" needs Gaussian log-probs, which rollout.noise.type = '
            f'"{job.rollout.noise.type}" has not: set it to "none", or choose another step'
        )
    if part.old_log_probs == "rollout" and part.correction.joint and mode in ("truncated", "band"):
        yield (
            f'algorithm.correction.mode = "{mode}" with joint = true weighs by a ratio that the loss does not hold '
            'when algorithm.old_log_probs = "rollout": set joint to false, mode to "rejection", or old_log_probs to '
            '"recompute"'
        )
    rejecting = ("reject_low", "reject_high")
    silent = {
        "none": ("low", "high", "joint", "level", "normalize", *rejecting),
        "truncated": ("low",),
        "band": rejecting,
        "rejection": rejecting,
    }[mode]
    if part.old_log_probs == "rollout" and part.correction.needs_all_rows:
        name = "level" if part.correction.level == "sequence" else "normalize"
        yield (
            f'algorithm.correction.{name} = "{getattr(part.correction, name)}" needs the log-probs of all rows before '
            'the first update, which algorithm.old_log_probs = "rollout" saves: set that to "recompute", or leave '
            f"algorithm.correction.{name} out"
        )
    yield from _unheard(
        job,
        tuple(f"algorithm.correction.{name}" for name in silent),
        f'with algorithm.correction.mode = "{mode}": leave it out, or choose a mode that reads it',
    )


def _pairs(job: JobSpec) -> Iterator[str]:
    if not job.loss.needs_pairs:
        if job.method.data == "preferences":
            yield f"algorithm.name = {job.method.name} learns from pairs: its loss must be one of {_names(pairs=True)}"
        return
    size, pairs = job.rollout.made_of_group, job.algorithm.pairs_per_group
    if job.method.data == "preferences":
        if size != 2 or pairs != 1:
            yield (
                f"algorithm.name = {job.method.name} has one pair a prompt: leave rollout.group_size at 2 and "
                "algorithm.pairs_per_group at 1"
            )
    elif 2 * pairs > size:
        setting = "rollout.group_size" if size == job.rollout.group_size else "rollout.preview.keep"
        yield f"algorithm.pairs_per_group = {pairs} needs {setting} of at least {2 * pairs}, not {size}"


def _advantages(job: JobSpec) -> Iterator[str]:
    part, loss = job.algorithm, job.loss
    if loss.needs_pairs:
        yield from _unheard(
            job,
            (
                "algorithm.advantage_std",
                "algorithm.advantage_clamp",
                "algorithm.reward_combination",
                "algorithm.best_of",
                "algorithm.diversity",
            ),
            f"with algorithm.loss = {loss.name}, whose pairs go by the weighted sum of the rewards: leave it out",
        )
    elif job.rollout.group_size < 2 and loss.reads_rewards and not job.trains_on_gradients:
        yield "rollout.group_size = 1 gives every sample the advantage 0, so nothing is learnt: set it to 2 or more"
    if part.diversity is not None:
        yield from _watching(job, "algorithm.diversity", part.diversity)
    if part.reward_combination == "normalized" and part.advantage_std == "none":
        yield (
            'algorithm.advantage_std = "none" has no effect with algorithm.reward_combination = "normalized", which '
            "divides by std twice: leave it out"
        )
    if part.reward_combination == "separate" and part.advantage_std == "none":
        yield (
            'algorithm.reward_combination = "separate" with algorithm.advantage_std = "none" is the weighted sum '
            'itself: set the one to "sum", or the other to "group" or "global"'
        )
    of_group = job.rollout.made_of_group
    if not loss.needs_pairs and part.best_of is not None and part.best_of >= of_group:
        setting = "rollout.group_size" if of_group == job.rollout.group_size else "rollout.preview.keep"
        yield (
            f"algorithm.best_of = {part.best_of} leaves out no sample of a group of {of_group}: lower it, raise "
            f"{setting}, or leave it out"
        )


def _watching(job: JobSpec, setting: str, name: str) -> Iterator[str]:
    """Problems of a setting that names a reward which must not count itself."""
    if name not in job.rewards:
        yield f'{setting} names "{name}", which is no reward of the job: give [rewards.{name}] with weight = 0'
    elif job.rewards[name].has_influence:
        yield f"{setting} names rewards.{name}, which counts in the sum as well: set rewards.{name}.weight = 0"


def _kl_reward(job: JobSpec) -> Iterator[str]:
    part = job.algorithm
    if part.kl_reward == 0:
        return
    if job.method.data == "preferences":
        yield (
            f"algorithm.kl_reward has no effect with algorithm.name = {job.method.name}, which samples nothing: leave "
            "it out"
        )
    elif job.trainer.mode == "full":
        yield (
            'algorithm.kl_reward with trainer.mode = "full" would need a second copy of the weights in every rollout: '
            'set trainer.mode = "lora", or use algorithm.kl_coef, which the trainer measures'
        )
    elif job.rollout.noise.eta == 0:
        yield (
            "algorithm.kl_reward is measured at noisy steps, and rollout.noise.eta = 0 has none: give an eta above 0, "
            "or use algorithm.kl_coef"
        )
    if part.reward_combination != "sum":
        yield (
            "algorithm.kl_reward is subtracted from the sum of the rewards, which algorithm.reward_combination = "
            f'"{part.reward_combination}" does not form: set that to "sum", or use algorithm.kl_coef'
        )


def _adapter(job: JobSpec) -> Iterator[str]:
    if job.model.adapter is not None and job.trainer.resume is not None:
        yield "model.adapter has no effect with trainer.resume, whose checkpoint has an adapter: leave one of them out"
    if job.trainer.mode == "lora":
        return
    if job.model.adapter is not None:
        yield (
            'model.adapter: trainer.mode = "full" has no adapter that could start from it: export the pipeline with '
            'the adapter merged in (trainer.lora.merge) and give that as model.path, or set trainer.mode = "lora"'
        )
    yield from _unheard(
        job, ("trainer.lora.merge",), 'with trainer.mode = "full", which exports a whole pipeline anyway: leave it out'
    )


def _rewards(job: JobSpec) -> Iterator[str]:
    rewards = job.rewards
    is_scored = job.method.data == "prompts" and job.loss.reads_rewards
    if (is_scored or job.data.is_validated) and not rewards:
        yield "rewards: name at least one reward service, for example [rewards.ocr]"
    if job.method.data != "prompts" or not rewards:
        return
    if not job.is_evaluation and is_scored:
        yield from _without_influence(rewards)
    for name, part in rewards.items():
        if part.on_failure == "skip" and part.gate is not None:
            yield (
                f'rewards.{name}.on_failure = "skip" would open its gate while the service is unreachable: set it to '
                '"pause" or "drop"'
            )
        if is_scored and part.on_failure == "skip" and part.has_influence and not _others_with_influence(job, name):
            yield (f'rewards.{name}.on_failure = "skip" leaves no reward to continue with: set it to "pause" or "drop"')
        if part.clip is not None and not part.has_influence:
            yield f"rewards.{name}.clip has no effect with a weight of 0: leave it out"


def _without_influence(rewards: Mapping[str, RewardPart]) -> Iterator[str]:
    if not any(part.weight for part in rewards.values()):
        yield "rewards.*.weight is 0 throughout, so nothing is learnt: give one of them a weight"
    elif not any(part.has_influence for part in rewards.values()):
        yield "rewards.*.curve is 0 throughout, so nothing is learnt: give one of them a factor other than 0"


def _others_with_influence(job: JobSpec, name: str) -> bool:
    """Whether every source that a reward scores has another reward that counts."""
    parts = [job.data.scoring(source.name, job.rewards) for source in job.data.each]
    return all(
        any(part.has_influence for other, part in rewards.items() if other != name)
        for rewards in parts
        if name in rewards
    )


def _sources(job: JobSpec) -> Iterator[str]:
    known = ", ".join(sorted(job.rewards)) or "none"
    for number, source in enumerate(job.data.sources):
        setting = f"data.sources.{number}.rewards"
        if source.rewards is None:
            continue
        if job.method.data != "prompts":
            yield f"{setting} has no effect with algorithm.name = {job.method.name}, whose data say what is better"
            continue
        if unknown := sorted(source.rewards.keys() - job.rewards.keys()):
            yield f"{setting}.{unknown[0]}: the job has no such reward; it has: {known}"
        elif job.loss.reads_rewards and not any(
            part.has_influence for part in job.data.scoring(source.name, job.rewards).values()
        ):
            yield f"{setting} has no weight throughout, so its samples teach nothing: name a reward that has one"
    if job.data.sources and all(source.rewards is not None for source in job.data.sources):
        used = {name for source in job.data.sources for name in source.rewards or ()}
        if unused := sorted(job.rewards.keys() - used):
            yield f"rewards.{unused[0]} scores no source: name it in data.sources.N.rewards, or leave it out"


def _batches(job: JobSpec) -> Iterator[str]:
    part = job.trainer
    number, what = job.trained_per_step, "samples"
    if job.loss.needs_pairs:
        number, what = number // 2, "pairs"
    elif job.loss.needs_groups:
        number, what = job.rollout.prompts_per_step, "groups"
    if number < part.updates_per_step and _is_changed(job, "trainer.updates_per_step"):
        yield (
            f"trainer.updates_per_step = {part.updates_per_step} is more than the {number} {what} that a step trains "
            "on; lower it or raise rollout.prompts_per_step"
        )
    if job.loss.needs_pairs and part.micro_batch_size < 2:
        yield f"trainer.micro_batch_size = 1 cannot hold a pair, which algorithm.loss = {job.loss.name} needs: give 2"
    if job.loss.needs_groups and part.micro_batch_size < (of_group := job.rollout.made_of_group):
        setting = "rollout.group_size" if of_group == job.rollout.group_size else "rollout.preview.keep"
        yield (
            f"trainer.micro_batch_size = {part.micro_batch_size} cannot hold a group, which algorithm.loss = "
            f"{job.loss.name} needs: raise it to {setting} = {of_group}, or lower that"
        )
    if part.deterministic and job.loss.kind == "policy" and job.algorithm.best_of is not None:
        yield (
            "trainer.deterministic repeats the rollout's batches, of which algorithm.best_of leaves samples out: set "
            "trainer.deterministic = false, or leave algorithm.best_of out"
        )
    if part.deterministic and part.compile:
        yield (
            "trainer.deterministic recomputes the rollout's log-probs bit for bit, which compiled blocks do not: set "
            "trainer.compile or trainer.deterministic to false"
        )
    if part.deterministic and job.loss.kind == "policy" and (job.rollout.compile or job.rollout.quantization != "none"):
        yield (
            "trainer.deterministic recomputes the rollout's log-probs bit for bit, which compiled or quantized ones do "
            'not allow: set rollout.compile = false and rollout.quantization = "none", or trainer.deterministic = '
            "false"
        )


def _sharding(job: JobSpec) -> Iterator[str]:
    if job.trainer.sharding == "replicate" and job.trainer.mode == "full":
        yield (
            'trainer.sharding = "replicate" with trainer.mode = "full" would keep gradients and moments of all weights '
            'on every rank: set it to "auto" or "fsdp"'
        )


def _sampling_trainer(job: JobSpec) -> Iterator[str]:
    part = job.trainer
    setting = f'trainer.samples = "{part.samples}"'
    if part.samples == "no":
        return
    if part.mode == "full":
        yield (
            f"{setting} samples with the frozen base of an adapter, and full training has none: set trainer.mode "
            '= "lora", or trainer.samples = "no"'
        )
    if part.world_size > 1 and part.sharding == "fsdp":
        yield (
            f'{setting} needs the whole base on each rank, which trainer.sharding = "fsdp" shares out: set that to '
            '"auto", or trainer.samples = "no"'
        )
    if part.samples == "only" and job.schedule.max_staleness > 0:
        yield (
            f"{setting} is on-policy, and schedule.max_staleness = {job.schedule.max_staleness} is not: set that to 0, "
            'or trainer.samples = "idle"'
        )


def _base(job: JobSpec) -> Iterator[str]:
    if job.model.base == "plain":
        yield from _unheard(
            job, ("trainer.base_gradients",), 'with model.base = "plain": leave it out, or set that to "fp8"'
        )
        return
    if job.trainer.mode == "full":
        yield 'model.base = "fp8" is a frozen base: set trainer.mode = "lora", or leave model.base out'
    if job.model.dtype != "bfloat16":
        yield f'model.base = "fp8" works on models in bfloat16, not {job.model.dtype}: set model.dtype'
    if job.trainer.sharding == "fsdp" and job.trainer.world_size > 1:
        yield 'model.base = "fp8" is whole on every rank: set trainer.sharding to "auto" or "replicate"'
    if job.loss.kind == "policy" and job.algorithm.old_log_probs == "rollout":
        yield (
            'algorithm.old_log_probs = "rollout" with model.base = "fp8" would put an unmeasured gap into the ratio of '
            'the loss: set algorithm.old_log_probs to "first_forward" or "recompute"'
        )
    if job.trainer.lora.merge:
        yield (
            'model.base = "fp8" exports the adapter alone: leave trainer.lora.merge out, and merge the adapter into '
            "the plain base after the job"
        )
    yield from _unheard(
        job, ("rollout.quantization",), 'with model.base = "fp8", which rollouts compute with anyway: leave it out'
    )


def _merged(job: JobSpec) -> Iterator[str]:
    if job.trainer.mode == "full":
        yield from _unheard(job, ("rollout.adapter",), 'with trainer.mode = "full", which has no adapter: leave it out')
        return
    if job.rollout.adapter == "separate" or job.loss.kind != "policy":
        return
    if job.algorithm.old_log_probs == "rollout":
        yield (
            'algorithm.old_log_probs = "rollout" with rollout.adapter = "merged" would put an unmeasured gap into the '
            'ratio of the loss: set algorithm.old_log_probs to "first_forward" or "recompute"'
        )
    if job.trainer.deterministic:
        yield (
            "trainer.deterministic recomputes the rollout's log-probs bit for bit, which a merged adapter does not "
            'allow: set rollout.adapter = "separate", or trainer.deterministic = false'
        )


def _average(job: JobSpec) -> Iterator[str]:
    if not job.averages:
        yield from _unheard(job, ("trainer.ema.every",), "without trainer.ema.decay: give that too, or leave it out")


def _steps_left(job: JobSpec) -> int:
    """Steps after the earliest window."""
    window, num_steps = job.rollout.window, job.rollout.num_inference_steps
    is_sized = window.strategy in ("fixed", "random", "progressive")
    return num_steps - (window.low + window.size if is_sized else window_end(job))


def _optimizer(job: JobSpec) -> Iterator[str]:
    part = job.trainer.optimizer
    total = job.schedule.steps * job.most_updates_per_step
    if part.warmup_updates >= total and not job.is_evaluation:
        yield (
            f"trainer.optimizer.warmup_updates = {part.warmup_updates} is not below the {total} updates of the job: "
            "lower it, or raise schedule.steps"
        )
    if part.lr_schedule == "constant":
        yield from _unheard(
            job,
            ("trainer.optimizer.final_lr",),
            'with trainer.optimizer.lr_schedule = "constant": leave it out, or use "linear" or "cosine"',
        )
    elif part.final_lr > part.lr:
        yield f"trainer.optimizer.final_lr = {part.final_lr} is above trainer.optimizer.lr = {part.lr}: lower it"


def _best(job: JobSpec) -> Iterator[str]:
    schedule = job.schedule
    if not schedule.keep_best:
        return
    if not job.data.is_validated:
        yield "schedule.keep_best compares held-out rewards: give data.validation, or leave it out"
    elif lcm(schedule.save_every, schedule.validate_every) >= schedule.steps:
        yield (
            f"schedule.keep_best has nothing to compare: no step below schedule.steps = {schedule.steps} is both saved "
            f"and validated; set schedule.validate_every to schedule.save_every = {schedule.save_every}"
        )
    for name, part in job.rewards.items():
        if part.weight and len({factor for _, factor in part.curve}) > 1:
            yield (
                f"schedule.keep_best compares the rewards of different steps, and rewards.{name}.curve changes what "
                "they count: leave one of them out"
            )


def window_end(job: JobSpec) -> int:
    """End (exclusive) of the steps that may carry noise."""
    window = job.rollout.window
    if window.strategy == "listed":
        return max(window.steps, default=-1) + 1
    if job.loss.from_steps:
        return window.high or job.rollout.num_inference_steps
    if window.high is not None:
        return window.high
    number = job.rollout.num_inference_steps
    return default_end(window.strategy, num_steps=number, size=window.size, low=window.low)


def _readers(job: JobSpec, name: str) -> list[str]:
    """Losses that read a setting, those for the job's kind of policy if there are any."""
    readers = [loss for loss in LOSSES.values() if name in loss.reads]
    suited = [loss for loss in readers if (loss.kind == "sequence") == job.writes_tokens]
    return sorted(loss.name for loss in suited or readers)


def _names(*, kind: str | None = None, pairs: bool = False) -> str:
    return ", ".join(
        sorted(loss.name for loss in LOSSES.values() if kind in (None, loss.kind) and (loss.needs_pairs or not pairs))
    )
