"""The table of what works with what is that of the registries, and the cases that are run keep their rule."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.generate import models
from docs.generate.markdown import outdated
from flowfleet.algorithms.registry import ALGORITHMS, LOSSES, Algorithm
from flowfleet.models.registry import FAMILIES
from tests.e2e.matrix import choice as support

PAGE = Path(__file__).parents[2] / models.PAGE


def test_the_table_is_up_to_date() -> None:
    assert outdated(PAGE, models.parts()) == [], "run `make docs`"


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_algorithm_is_taken_on_every_family_of_its_kind(family: str, algorithm: str) -> None:
    """Models and algorithms compose, flows with those of flows and models that write text with theirs; but for
    gradients of rewards, which are of pictures, and for data sets of films, which are read without sound."""
    kind = LOSSES[ALGORITHMS[algorithm].loss].kind
    reason = support.refusal(FAMILIES[family], ALGORITHMS[algorithm])
    suits = kind != "gradient" or FAMILIES[family].modality == "image"
    suits = suits and not (FAMILIES[family].sounds and ALGORITHMS[algorithm].data == "preferences")
    is_of_its_kind = FAMILIES[family].trains(writes_tokens=kind == "sequence")
    assert (reason == "") == (is_of_its_kind and suits), reason


def test_every_core_model_runs_with_each_of_its_algorithms() -> None:
    run = {(case.pipeline, case.algorithm) for case in support.run_cases()}
    assert all((pipeline, name) in run for pipeline, names in support.CORE_MODELS.items() for name in names)


def assert_rule(
    families: Mapping[str, Any], algorithms: Mapping[str, Algorithm], cases: Sequence[support.Case]
) -> None:
    """Every algorithm on two families and in both modes; every family with every class of loss and in both modes."""
    assert len({case[:2] for case in cases}) == len(cases), "a pair is run twice"
    of_algorithm, of_family = defaultdict(list), defaultdict(list)
    for case in cases:
        of_algorithm[case.algorithm].append(case)
        of_family[case.pipeline].append(case)
    classes = {support.loss_class(algorithm) for algorithm in algorithms.values()}
    for name in algorithms:
        assert len({case.pipeline for case in of_algorithm[name]}) >= 2, name
        assert {case.mode for case in of_algorithm[name]} == set(support.modes_of(algorithms[name])), name
    for family in families:
        found = {support.loss_class(algorithms[case.algorithm]) for case in of_family[family]}
        of_pictures = {"gradient"} if getattr(families[family], "modality", "image") != "image" else set()
        assert found == classes - of_pictures, family
        assert len(of_family[family]) < 2 or {case.mode for case in of_family[family]} == {"lora", "full"}, family


def test_the_cases_that_are_run_keep_the_rule() -> None:
    for writes in (False, True):
        families = {name: family for name, family in FAMILIES.items() if family.trains(writes_tokens=writes)}
        suited = {
            name: known for name, known in ALGORITHMS.items() if (LOSSES[known.loss].kind == "sequence") == writes
        }
        own = [case for case in support.run_cases() if case.pipeline in families and case.algorithm in suited]
        assert_rule(families, suited, own)
    assert len(support.run_cases()) < len(FAMILIES) * len(ALGORITHMS) / 2


@settings(deadline=None)
@given(num_families=st.integers(2, 12), losses=st.lists(st.sampled_from(["flow_grpo", "diffusion_nft", "dpo"])))
def test_a_new_family_or_algorithm_is_covered(num_families: int, losses: list[str]) -> None:
    losses += ["flow_grpo", "diffusion_nft", "dpo"]
    algorithms = {f"{n}": Algorithm(f"{n}", "", "", "", loss=loss) for n, loss in enumerate(losses)}
    families = {f"family {n}": None for n in range(num_families)}
    assert_rule(families, algorithms, support.choose_cases(families, algorithms))
