"""Chooses the pairs of family and algorithm that `make test-all` runs, which docs/models.md lists.

The pairs come from the registries, so a new algorithm or family is run without a change here. Free of torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from flowfleet.algorithms.registry import ALGORITHMS, LOSSES, Algorithm
from flowfleet.job.rules import sequences
from flowfleet.job.spec import parse_job
from flowfleet.models.registry import FAMILIES, ModelFamily

MODES = ("lora", "full")

CORE_MODELS = {
    "QwenImagePipeline": ("flow_grpo", "flow_dppo", "mix_grpo", "grpo_guard", "diffusion_nft", "dpo"),
    "BagelForConditionalGeneration": ("flow_grpo", "gspo"),
    "Qwen3OmniMoeThinkerForConditionalGeneration": ("gspo",),
    "WanPipeline": ("dance_grpo",),
    "StableDiffusion3Pipeline": ("flow_grpo", "dpo"),
    "HunyuanImage3ForCausalMM": ("mix_grpo", "srpo"),
}
"""Pipelines of core models, each with the algorithms that `make test-all` always runs on it."""


class Case(NamedTuple):
    """Job that `make test-all` runs."""

    pipeline: str
    """Family of the model."""
    algorithm: str
    mode: str
    """`trainer.mode`."""


def loss_class(algorithm: Algorithm) -> str:
    """policy, matching, gradient or preference: each kind of loss takes its own way through rollouts and trainer. One
    that learns from teachers takes that of the policy losses, with forwards of the teachers."""
    loss = LOSSES[algorithm.loss]
    return "preference" if loss.needs_pairs else "policy" if loss.kind == "distillation" else loss.kind


def modes_of(algorithm: Algorithm) -> tuple[str, ...]:
    """Modes that an algorithm takes: teachers are adapters, so their policy is one too."""
    return MODES if LOSSES[algorithm.loss].traits.reads_rewards else ("lora",)


def choose_cases(
    families: Mapping[str, Any],
    algorithms: Mapping[str, Algorithm],
    takes: Callable[[str, str], bool] = lambda family, algorithm: True,
    given: Iterable[tuple[str, str]] = (),
) -> list[Case]:
    """The pairs to run: those given (family, algorithm), every algorithm on two families, every family with a loss of
    every class that it takes, LoRA and full weights in turn. Deterministic, and as few as that takes."""
    pairs: list[tuple[str, str]] = []
    for wanted in dict.fromkeys(map(loss_class, algorithms.values())):
        members = [name for name, algorithm in algorithms.items() if loss_class(algorithm) == wanted]
        taken = [pair for pair in given if pair[1] in members]
        for times in (1, 2):
            for name in members:
                if sum(name == other for _, other in taken) >= times:
                    continue
                free = [family for family in families if (family, name) not in taken and takes(family, name)]
                taken += [(_least_used(free, Counter(family for family, _ in taken)), name)] if free else []
        for family in families:
            suited = [name for name in members if takes(family, name)]
            if suited and all(family != other for other, _ in taken):
                taken.append((family, _least_used(suited, Counter(name for _, name in taken))))
        pairs += taken
    return _with_modes(pairs, algorithms)


@cache
def run_cases() -> tuple[Case, ...]:
    """The cases of the registries as they are: those of flows, then those of models that write text."""
    cases: list[Case] = []
    for writes in (False, True):
        families = {name: family for name, family in FAMILIES.items() if family.trains(writes_tokens=writes)}
        suited = {name: known for name, known in ALGORITHMS.items() if writes_tokens(known) == writes}
        core = [(pipeline, name) for pipeline, names in CORE_MODELS.items() for name in names if name in suited]
        cases += choose_cases(
            families, suited, lambda family, name: not refusal(FAMILIES[family], ALGORITHMS[name]), core
        )
    return tuple(cases)


def writes_tokens(algorithm: Algorithm) -> bool:
    """True if it trains models that write text, not flows."""
    return LOSSES[algorithm.loss].traits.writes_tokens


def cases_on(kind: str, pipeline: str, *, writes: bool) -> list[Case]:
    """The cases that run on a kind of tiny checkpoint as a flow, or as a model that writes text. Two experts take the
    other mode than one, where the algorithm takes both."""
    own = [
        case
        for case in run_cases()
        if case.pipeline == pipeline and writes_tokens(ALGORITHMS[case.algorithm]) == writes
    ]
    if kind != "wan_two_experts":
        return own
    return [
        case._replace(
            mode=next((mode for mode in modes_of(ALGORITHMS[case.algorithm]) if mode != case.mode), case.mode)
        )
        for case in own
    ]


def refusal(family: ModelFamily, algorithm: Algorithm) -> str:
    """Why the least job of an algorithm on a family is refused; empty where it is taken."""
    if kind := sequences.refusal(family, LOSSES[algorithm.loss]):
        return kind
    if family.sounds and algorithm.data == "preferences":
        return "it learns from films with sound, and films of a data set are read without"
    job: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train": "data.jsonl"},
        "rewards": {"reward": {}},
        "algorithm": {"name": algorithm.name, **least_settings(algorithm)},
        "rollout": {"num_frames": 81 if family.modality == "video" else 1},
    }
    try:
        parse_job(job)
    except ValueError as error:
        return str(error)
    return ""


def least_settings(algorithm: Algorithm, teacher: str = "job:ID") -> dict[str, Any]:
    """Settings of `algorithm` that one needs besides its name."""
    return {} if LOSSES[algorithm.loss].traits.reads_rewards else {"teachers": {"teacher": {"adapter": teacher}}}


def _least_used(names: list[str], used: Counter[str]) -> str:
    return min(names, key=lambda name: used[name])


def _with_modes(pairs: list[tuple[str, str]], algorithms: Mapping[str, Algorithm]) -> list[Case]:
    """Gives each pair a mode, so that every algorithm and every family of two pairs or more has both, where the
    algorithm takes both.

    At each algorithm and each family its pairs are linked two by two, and linked pairs take different modes. Links
    alternate between algorithms and families, so a closed chain is of even length and this never contradicts itself.
    """
    links: list[list[int]] = [[] for _ in pairs]
    waiting: dict[tuple[str, str], int] = {}
    for number, (family, name) in enumerate(pairs):
        if modes_of(algorithms[name]) != MODES:
            continue
        for end in (("family", family), ("algorithm", name)):
            other = waiting.pop(end, None)
            if other is None:
                waiting[end] = number
            else:
                links[number].append(other)
                links[other].append(number)
    modes: dict[int, int] = {}
    for start in range(len(pairs)):
        chain = [(start, modes.get(start, 0))]
        while chain:
            number, mode = chain.pop()
            modes[number] = mode
            chain += [(other, 1 - mode) for other in links[number] if other not in modes]
    return [
        Case(family, name, (own := modes_of(algorithms[name]))[modes[number] % len(own)])
        for number, (family, name) in enumerate(pairs)
    ]
