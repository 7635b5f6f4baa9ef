"""The frozen prompts: the script writes them again, and what is held out is in no prompt of training."""

import json
from collections import Counter
from typing import Any

import pytest
import torch

from recipes.composition import make_prompts
from recipes.composition.atlas import blank
from recipes.composition.captions import caption
from recipes.composition.make_prompts import ASKED, WEIGHTS, read_prompts, splits, weighted
from recipes.composition.pretrain import PLANS
from recipes.composition.scenes import World, choose
from recipes.composition.world import WORLDS
from services.reward.scorers.networks.geneval_rules import read_request

SPLITS = ("train", "validation", "seen", "unseen")


@pytest.fixture(scope="module")
def small() -> World:
    return World.small(blank())


@pytest.mark.parametrize("world", ["small", pytest.param("medium", marks=pytest.mark.long)])
def test_the_script_gives_the_same_lines(world: str) -> None:
    lines = splits(World.named(world, blank()), ASKED[world])
    assert lines == {name: read_prompts(world, name) for name in SPLITS}


def test_every_world_has_prompts_and_a_plan() -> None:
    assert set(WORLDS) == set(ASKED) == set(PLANS)
    assert set(World.small(blank()).nouns) < set(World.medium(blank()).nouns) < set(World.full(blank()).nouns)


@pytest.mark.parametrize("world", WEIGHTS)
def test_weighted_prompts_are_of_training_in_the_shares_of_their_weights(world: str) -> None:
    lines, trained, weights = read_prompts(world, "weighted"), read_prompts(world, "train"), WEIGHTS[world]
    assert lines == weighted(trained, weights)
    assert set(weights) == set(ASKED[world])
    prompts = [line["prompt"] for line in lines]
    assert len(prompts) == len(set(prompts) & {line["prompt"] for line in trained})
    counts = Counter(line["metadata"]["tag"] for line in lines)
    assert counts == {category: round(counts["counting"] * weight / 5) for category, weight in weights.items()}


@pytest.mark.parametrize("world", WORLDS)
def test_files_are_of_the_asked_categories_and_share_no_prompt(world: str) -> None:
    prompts: Counter[str] = Counter()
    for split in SPLITS:
        lines = read_prompts(world, split)
        assert {line["metadata"]["tag"] for line in lines} == set(ASKED[world])
        assert all(read_request(line["metadata"]).tag == line["metadata"]["tag"] for line in lines)
        prompts.update(line["prompt"] for line in lines)
    assert max(prompts.values()) == 1


def test_pictures_of_training_are_never_captioned_with_a_prompt_of_a_test(small: World) -> None:
    trained = set(caption(small, choose(small, 20_000, torch.Generator().manual_seed(1))))
    for split in ("validation", "seen", "unseen"):
        assert not trained & {line["prompt"] for line in read_prompts("small", split)}


INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


def asked(line: dict[str, Any]) -> tuple[Any, ...]:
    """What a line asks for, in no order and no words: things and their relation as the first by name stands to the
    second, word and style."""
    metadata = line["metadata"]
    include = json.loads(metadata["geneval"]).get("include", [])
    things = sorted((thing["class"], str(thing.get("count")), thing.get("color", "")) for thing in include)
    placed = [(thing["class"], *thing["position"]) for thing in include if thing.get("position")]
    relation: tuple[str, ...] = ()
    for subject, place, target in placed:
        other = include[target]["class"]
        relation = (subject, place, other) if subject < other else (other, INVERSE[place], subject)
    return metadata["tag"], tuple(things), relation, metadata.get("word"), metadata.get("style")


@pytest.mark.parametrize("world", WORLDS)
def test_nothing_that_a_test_asks_for_is_asked_in_training(world: str) -> None:
    trained = {asked(line) for line in read_prompts(world, "train")}
    assert len({asked(line)[2] for line in read_prompts(world, "train")}) > 50  # not all are the same
    for split in ("validation", "seen", "unseen"):
        assert not trained & {asked(line) for line in read_prompts(world, split)}


def test_combinations_of_the_seen_prompts_are_trained_and_those_of_unseen_are_not() -> None:
    def colored(split: str) -> set[tuple[str, str]]:
        lines = [json.loads(line["metadata"]["geneval"]) for line in read_prompts("small", split)]
        return {(wanted["class"], wanted["color"]) for line in lines for wanted in line["include"] if "color" in wanted}

    assert colored("seen") | colored("validation") <= colored("train")
    lines = [line for line in read_prompts("small", "unseen") if line["metadata"]["tag"] == "colors"]
    for line in lines:
        (wanted,) = json.loads(line["metadata"]["geneval"])["include"]
        assert (wanted["class"], wanted["color"]) not in colored("train")


def test_the_folder_holds_the_files_of_the_script_alone() -> None:
    wanted = {f"{world}_{split}.jsonl" for world in WORLDS for split in SPLITS}
    wanted |= {f"{world}_weighted.jsonl" for world in WEIGHTS}
    assert {path.name for path in make_prompts.PROMPTS.iterdir()} == wanted
