"""The frozen prompts: the script writes them again, and what is held out is in no prompt of training."""

import json
from collections import Counter

import pytest
import torch

from recipes.composition import make_prompts
from recipes.composition.atlas import blank
from recipes.composition.captions import caption
from recipes.composition.make_prompts import read_prompts, splits
from recipes.composition.scenes import CATEGORIES, World, choose
from services.reward.scorers.networks.geneval_rules import read_request

SPLITS = ("train", "validation", "seen", "unseen")


@pytest.fixture(scope="module")
def small() -> World:
    return World.small(blank())


def test_the_script_gives_the_same_lines(small: World) -> None:
    assert splits(small) == {name: read_prompts("small", name) for name in SPLITS}


@pytest.mark.parametrize("world", ["small", "full"])
def test_files_are_of_all_categories_and_share_no_prompt(world: str) -> None:
    prompts: Counter[str] = Counter()
    for split in SPLITS:
        lines = read_prompts(world, split)
        assert {line["metadata"]["tag"] for line in lines} == set(CATEGORIES)
        assert all(read_request(line["metadata"]).tag == line["metadata"]["tag"] for line in lines)
        prompts.update(line["prompt"] for line in lines)
    assert max(prompts.values()) == 1


def test_pictures_of_training_are_never_captioned_with_a_prompt_of_a_test(small: World) -> None:
    trained = set(caption(small, choose(small, 20_000, torch.Generator().manual_seed(1))))
    for split in ("validation", "seen", "unseen"):
        assert not trained & {line["prompt"] for line in read_prompts("small", split)}


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
    wanted = {f"{world}_{split}.jsonl" for world in ("small", "full") for split in SPLITS}
    assert {path.name for path in make_prompts.PROMPTS.iterdir()} == wanted
