"""Labels of pictures that are kept: whom they are of, and how far the small world's judge agrees with them."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import pytest

from recipes.composition.judges import labels, service
from recipes.composition.judges.findings import answer
from recipes.composition.make_prompts import PROMPTS, read_lines, read_prompts

LABELED = Path(labels.__file__).parent / "labeled"


@pytest.mark.parametrize(("painter", "least"), [("base", 0.91), ("awm", 0.84), ("flow_grpo", 0.84)])
def test_the_held_out_judge_agrees_with_the_labels_that_are_kept(painter: str, least: float) -> None:
    folder = LABELED / painter
    shown, lines = labels.read_labels(folder / "labels.csv"), read_lines(folder / labels.PROMPTS)
    found = service.look("heldout", labels.read(folder, list(shown)))
    said = [answer(one, lines[number]["metadata"])["correct"] for number, one in zip(shown, found, strict=True)]
    agreed = [verdict == label for verdict, label in zip(said, shown.values(), strict=True)]
    assert len(agreed) == 81
    assert sum(agreed) / 81 >= least


def test_a_second_look_is_at_the_same_pictures() -> None:
    folder = LABELED / "medium_trained"
    first, second = (labels.read_labels(folder / name) for name in ("labels.csv", "second_look.csv"))
    assert first.keys() == second.keys()
    assert sum(first[number] != second[number] for number in first) == 8


@pytest.mark.parametrize(
    ("kept", "right", "counting", "gained", "lost"),
    [
        ("medium_flow_grpo", {"Flow-GRPO, seed 1": 60, "Flow-GRPO, seed 3": 60}, [8, 7], [18, 17], [2, 1]),
        (
            "medium_weighted",
            {"Flow-GRPO, seed 1": 61, "Flow-GRPO, seed 2": 61, "Flow-GRPO, seed 3": 63, "CRD, seed 1": 60},
            [8, 6, 8, 9],
            [20, 19, 22, 20],
            [3, 2, 3, 4],
        ),
    ],
)
def test_labels_of_trained_models_pair_their_pictures_with_the_bases(
    kept: str, right: dict[str, int], counting: list[int], gained: list[int], lost: list[int]
) -> None:
    folder = LABELED / kept
    lines = read_lines(folder / labels.PROMPTS)
    base, again = {}, 0
    for row in csv.DictReader((LABELED / "medium_flow_grpo" / "base.csv").open(newline="")):
        number, place = int(row["number"]), LABELED / row["folder"]
        assert read_lines(place / labels.PROMPTS)[number]["prompt"] == row["prompt"]
        base[row["prompt"]] = row["shown"] == "yes"
        if row["folder"] == "medium":
            again += labels.read_labels(place / "labels.csv")[number] == labels.CALLED[row["shown"]]
    shown: dict[str, dict[str, bool]] = {painter: {} for painter in right}
    for row in csv.DictReader((folder / "labels.csv").open(newline="")):
        shown[row["painted_by"]][lines[int(row["number"])]["prompt"]] = row["shown"] == "yes"
    assert (again, sum(base.values())) == (33, 44)
    assert {painter: sum(one.values()) for painter, one in shown.items()} == right
    assert all(one.keys() == base.keys() for one in shown.values())
    counts = {line["prompt"] for line in lines if line["metadata"]["tag"] == "counting"}
    assert [sum(one[prompt] for prompt in counts) for one in shown.values()] == counting
    assert [sum(one[prompt] > base[prompt] for prompt in base) for one in shown.values()] == gained
    assert [sum(one[prompt] < base[prompt] for prompt in base) for one in shown.values()] == lost


def test_labels_of_other_prompts_are_of_all_the_others() -> None:
    folder = LABELED / "medium_weighted_others"
    lines = read_lines(folder / labels.PROMPTS)
    asked = [line["prompt"] for line in lines]
    others = {line["prompt"] for line in read_lines(LABELED / "medium_weighted" / labels.PROMPTS)}
    held_out = {
        line["prompt"] for line in read_lines(PROMPTS / "medium_seen.jsonl") if line["metadata"]["tag"] != "style"
    }
    assert {*asked} | others == held_out
    assert len(asked) == 150 == len({*asked} - others)
    right: dict[str, list[float]] = {}
    for number, shown in labels.read_labels(folder / "labels.csv").items():
        right.setdefault(lines[number]["metadata"]["tag"], []).append(shown)
    assert {tag: (sum(ones), len(ones)) for tag, ones in right.items()} == {
        "single_object": (7, 10),
        "two_object": (25, 28),
        "counting": (25, 28),
        "colors": (24, 28),
        "position": (25, 28),
        "color_attr": (19, 28),
    }


@pytest.mark.parametrize(
    ("name", "of_base", "of_trained"),
    [
        (
            "medium_longer",
            54,
            {"Flow-GRPO, seed 1": (60, 8, 2), "Flow-GRPO, seed 2": (60, 9, 3), "Flow-GRPO, seed 3": (62, 8, 0)},
        ),
        ("medium_unseen", 89, {"Flow-GRPO, seed 4": (94, 12, 7)}),
    ],
)
def test_labels_pair_the_longer_trained_base_with_what_was_made_of_it(
    name: str, of_base: int, of_trained: dict[str, tuple[int, int, int]]
) -> None:
    """Accepted of the base's and of each model's; of the latter also how many were gained and lost."""
    folder = LABELED / name
    lines, shown = read_lines(folder / labels.PROMPTS), defaultdict[str, dict[str, bool]](dict)
    rows = list(csv.DictReader((folder / "labels.csv").open(newline="")))
    assert [int(row["number"]) for row in rows] == list(range(len(lines)))
    for row in rows:
        line = lines[int(row["number"])]
        assert row["category"] == line["metadata"]["tag"]
        shown[row["painted_by"]][line["prompt"]] = row["shown"] == "yes"
    base = shown.pop("base")
    if name == "medium_longer":
        assert base.keys() == {line["prompt"] for line in read_lines(LABELED / "medium_weighted" / labels.PROMPTS)}
    else:
        assert base.keys() <= {line["prompt"] for line in read_prompts("medium", "unseen")}
    assert sum(base.values()) == of_base
    assert all(one.keys() == base.keys() for one in shown.values())
    changes = {
        painter: (
            sum(one.values()),
            sum(one[prompt] > base[prompt] for prompt in base),
            sum(one[prompt] < base[prompt] for prompt in base),
        )
        for painter, one in shown.items()
    }
    assert changes == of_trained
