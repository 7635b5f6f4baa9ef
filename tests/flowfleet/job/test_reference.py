"""What a user means by a name, and what an unknown name may stand for."""

from __future__ import annotations

import re

import pytest

from flowfleet.job.reference import PEERS, Setting, find, near, settings
from flowfleet.job.spec import JobSpec, parse_job

KNOWN = list(settings(JobSpec))


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("trainer.lr", "trainer.optimizer.lr"),
        ("learning_rate", "trainer.optimizer.lr"),
        ("trainer.optimizer.learning_rate", "trainer.optimizer.lr"),
        ("rollout.cfg", "rollout.guidance_scale"),
        ("rollout.grup_size", "rollout.group_size"),
        ("trainer.optimzer", "trainer.optimizer"),
        ("traner", "trainer"),
        ("rewards.sharp.wieght", "rewards.sharp.weight"),
        ("algorithm.clip", "algorithm.clip_range"),
        ("schedule.epochs", "schedule.steps"),
    ],
)
def test_an_unknown_name_leads_to_the_setting(name: str, first: str) -> None:
    assert near(name, KNOWN)[0] == first


def test_a_word_of_a_name_leads_to_settings_that_have_it() -> None:
    words = {part for one in KNOWN for part in re.split(r"[._]", one.name)} - {"NAME", "N"}
    unknown = {word: near(word, KNOWN) for word in words if word not in PEERS and not find(word, KNOWN)}
    assert len(unknown) > 50
    assert {word: found for word, found in unknown.items() if not found or word not in "".join(found)} == {}


def test_a_misspelled_word_leads_to_its_settings() -> None:
    assert {"rollout.guidance_scale"} <= set(near("guidance", KNOWN)) & set(near("gudance", KNOWN))
    assert near("trainer.guidance", KNOWN)[0].startswith("rollout.guidance")
    assert near("optim", KNOWN)[0].startswith("trainer.optimizer.")


def test_nothing_is_guessed_for_what_is_like_nothing() -> None:
    assert near("rollout.zzzzzz", KNOWN) == []


def test_words_of_other_tools_lead_to_settings_that_exist() -> None:
    names = {one.name for one in KNOWN}
    assert {word: name for word, name in PEERS.items() if name not in names and not name.startswith("`")} == {}


def test_find_takes_a_name_a_table_a_leaf_and_other_words() -> None:
    assert [one.name for one in find("trainer.optimizer.lr", KNOWN)] == ["trainer.optimizer.lr"]
    assert len(find("trainer.optimizer", KNOWN)) == len(
        [one for one in KNOWN if one.name.startswith("trainer.optimizer.")]
    )
    assert [one.name for one in find("weight", KNOWN)] == ["rewards.NAME.weight", "data.sources.N.weight"]
    assert [one.name for one in find("cfg", KNOWN)] == ["rollout.guidance_scale"]


def test_a_setting_says_what_it_may_hold() -> None:
    by_name = {one.name: one for one in KNOWN}
    assert by_name["rollout.group_size"] == Setting(
        "rollout.group_size", "integer, ≥ 1, ≤ 4096", "16", "Samples of one prompt, scored against each other."
    )
    assert by_name["rollout.quantization"].values == "`none`, `fp8`"
    assert by_name["model.path"].default == "required"


def test_the_refusal_names_the_setting() -> None:
    with pytest.raises(ValueError, match=r"trainer.lr: unknown setting; did you mean trainer.optimizer.lr\?"):
        parse_job({"model": {"path": "m"}, "data": {"train": "d.txt"}, "rewards": {"ocr": {}}, "trainer": {"lr": 1e-4}})


def test_parameters_of_rewards_may_be_numbers_and_booleans() -> None:
    job = {
        "model": {"path": "m"},
        "data": {"train": "d.txt"},
        "rewards": {"ocr": {"params": {"a": 0.5, "b": True, "c": 3}}},
    }
    assert parse_job(job).rewards["ocr"].params == {"a": "0.5", "b": "true", "c": "3"}
