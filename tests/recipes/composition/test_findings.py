"""What a judge's findings are worth: the benchmark's rules, and words and styles next to them."""

from typing import Any

import pytest
import torch

from recipes.composition.atlas import LETTERS
from recipes.composition.captions import altered, prompt_lines
from recipes.composition.judges.findings import SIGN, Findings, Thing, answer
from recipes.composition.scenes import CATEGORIES, Scenes, World


def truth(world: World, scenes: Scenes) -> list[Findings]:
    """What a judge without error would find."""
    found = []
    for place in range(len(scenes)):
        things = [
            Thing(
                world.nouns[noun],
                tuple((scenes.boxes[place, slot] * world.size).tolist()),
                1.0,
                world.colors[max(0, int(scenes.colors[place, slot]))],
            )
            for slot, noun in enumerate(scenes.nouns[place].tolist())
            if noun >= 0
        ]
        word = "".join(LETTERS[letter] for letter in scenes.word[place].tolist() if letter >= 0)
        if word:
            things.append(Thing(SIGN, tuple((scenes.sign[place] * world.size).tolist()), 1.0, "white"))
        style = int(scenes.styles[place, 0])
        found.append(Findings(things, world.styles[style] if style >= 0 else "", word))
    return found


def test_the_truth_is_right_about_what_is_shown_and_denies_all_else(world: World, scenes: Scenes) -> None:
    found = truth(world, scenes)
    for findings, line in zip(found, prompt_lines(world, scenes), strict=True):
        said = answer(findings, line["metadata"])
        assert (said["correct"], said["strict"], said["partial"], said["extra"]) == (1.0, 1.0, 1.0, 0.0)
    other = altered(world, scenes, torch.Generator().manual_seed(1))
    two = CATEGORIES.index("two_object")
    doubled = (other.category == two) & (other.nouns[:, 0] == other.nouns[:, 1])
    for findings, line, is_doubled in zip(found, prompt_lines(world, other), doubled.tolist(), strict=True):
        if not is_doubled:
            assert answer(findings, line["metadata"])["correct"] == 0.0
            assert answer(findings, line["metadata"])["partial"] < 1.0


WORD = {"geneval": '{"tag": "text", "include": [{"class": "sign", "count": 1}]}', "word": "KATE"}
STYLE = {"geneval": '{"tag": "style", "include": [{"class": "cat", "count": 1}]}', "style": "flat"}
BOX = (1.0, 1.0, 9.0, 9.0)


@pytest.mark.parametrize(
    ("things", "style", "word", "metadata", "wanted"),
    [
        ([SIGN], "", "KATE", WORD, {"partial": 1.0, "correct": 1.0, "word": 1.0, "count": 1.0}),
        ([SIGN], "", "KAT", WORD, {"partial": 0.875, "correct": 0.0, "strict": 0.0, "word": 0.75}),
        ([], "", "", WORD, {"partial": 0.0, "correct": 0.0, "word": 0.0, "count": 0.0}),
        ([SIGN], "", "XYZXYZXYZ", WORD, {"word": 0.0}),
        (["cat"], "flat", "", STYLE, {"partial": 1.0, "correct": 1.0, "style": 1.0, "extra": 0.0}),
        (["cat", "car"], "glossy", "", STYLE, {"partial": 0.5, "correct": 0.0, "style": 0.0, "extra": 1.0}),
    ],
)
def test_words_and_styles(
    things: list[str], style: str, word: str, metadata: dict[str, str], wanted: dict[str, float]
) -> None:
    said = answer(Findings([Thing(name, BOX, 0.9, "red") for name in things], style, word), metadata)
    assert {name: said[name] for name in wanted} == pytest.approx(wanted)
    assert said["score"] == said["partial"]


def test_the_most_certain_things_decide_colors() -> None:
    asked: dict[str, Any] = {"geneval": '{"tag": "colors", "include": [{"class": "cat", "count": 1, "color": "red"}]}'}
    things = [Thing("cat", BOX, 0.4, "blue"), Thing("cat", (20.0, 20.0, 30.0, 30.0), 0.9, "red")]
    said = answer(Findings(things, "", ""), asked, "correct")
    assert said["score"] == said["correct"] == 1.0
    assert said["partial"] < 1.0  # two were found where one was asked for


def test_metadata_without_a_request_are_refused() -> None:
    with pytest.raises(ValueError, match="geneval is missing"):
        answer(Findings([], "", ""), {"word": "KAT"})
    with pytest.raises(ValueError, match="no score is called"):
        answer(Findings([], "", ""), WORD, "best")
