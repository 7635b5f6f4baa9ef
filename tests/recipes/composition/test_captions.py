"""The grammar: captions say what is shown, flaws change or leave out one thing, and metadata ask for the same."""

import json
from collections import Counter

import pytest
import torch

from recipes.composition.captions import FRAMES, altered, caption, flawed, metadata, prompt_lines, tokens, words
from recipes.composition.heldout import is_allowed
from recipes.composition.scenes import CATEGORIES, Scenes, World, draw
from services.reward.scorers.networks.geneval_rules import COLORS, read_request


def of(world: World, category: str, **changes: object) -> Scenes:
    """One scene of the category, with these fields in place of what was drawn."""
    scenes = draw(world, 1, torch.Generator().manual_seed(4), categories=[category])
    for name, value in changes.items():
        tensor = getattr(scenes, name)
        given = torch.tensor(value)
        tensor[0] = torch.cat([given, torch.full((tensor.shape[1] - len(given),), -1)]) if tensor.dim() > 1 else given
    return scenes


def test_sentences_of_every_category(world: World) -> None:
    noun, color = world.nouns.index, world.colors.index
    apple, cat = noun("apple"), noun("cat")
    cases = [
        (of(world, "single_object", nouns=[apple], wording=0), "a photo of an apple"),
        (of(world, "two_object", nouns=[cat, apple], wording=3), "a cat and an apple"),
        (of(world, "counting", nouns=[cat] * 3, count=3, wording=7), "this shows three cats"),
        (of(world, "colors", nouns=[apple], colors=[color("orange")], wording=3), "an orange apple"),
        (of(world, "position", nouns=[cat, apple], relation=2, wording=0), "a photo of a cat above an apple"),
        (of(world, "position", nouns=[cat, apple], relation=1, wording=3), "a cat to the right of an apple"),
        (
            of(world, "color_attr", nouns=[cat, apple], colors=[color("black"), color("pink")], wording=3),
            "a black cat and a pink apple",
        ),
        (of(world, "text", word=[10, 0, 19], wording=3), 'a sign that says "KAT"'),
        (of(world, "style", nouns=[cat], styles=[2], wording=2), "a cat in flat style"),
    ]
    for scene, wanted in cases:
        assert caption(world, scene) == [wanted]


def test_metadata_have_the_form_of_the_benchmark(world: World) -> None:
    noun = world.nouns.index
    position = of(world, "position", nouns=[noun("cat"), noun("apple")], relation=0, wording=0)
    assert metadata(world, position) == [
        {
            "tag": "position",
            "include": [{"class": "apple", "count": 1}, {"class": "cat", "count": 1, "position": ["left of", 0]}],
            "prompt": "a photo of a cat left of an apple",
        }
    ]
    counting = metadata(world, of(world, "counting", nouns=[noun("cat")] * 3, count=3))[0]
    assert counting["include"] == [{"class": "cat", "count": 3}]
    assert counting["exclude"] == [{"class": "cat", "count": 4}]
    (text,) = prompt_lines(world, of(world, "text", word=[10, 0, 19]))
    assert text["metadata"]["word"] == "KAT"
    assert json.loads(text["metadata"]["geneval"])["include"] == [{"class": "sign", "count": 1}]
    (style,) = prompt_lines(world, of(world, "style", styles=[1]))
    assert style["metadata"]["style"] == world.styles[1]


def test_every_line_is_a_request_that_the_scorer_reads(world: World, scenes: Scenes) -> None:
    asked: Counter[str] = Counter()
    for line, text in zip(prompt_lines(world, scenes), caption(world, scenes), strict=True):
        request = read_request(line["metadata"])
        asked[request.tag] += 1
        assert line["prompt"] == text
        assert all(wanted.name in (*world.nouns, "sign") for wanted in request.include)
    assert set(asked) == set(CATEGORIES)


def test_tokens_are_words_of_the_vocabulary_and_spell_the_caption(world: World, scenes: Scenes) -> None:
    known = words(world)
    assert len(set(known)) == len(known)
    generator = torch.Generator().manual_seed(1)
    for text in (*caption(world, scenes), *flawed(world, scenes, 1.0, generator)):
        parts = tokens(text)
        assert set(parts) <= set(known)
        assert "".join(parts) == text.replace(" ", "")


def test_all_colors_and_wordings_are_spoken(world: World) -> None:
    said = " ".join(caption(world, draw(world, 2000, torch.Generator().manual_seed(2), categories=["colors"])))
    assert all(color in said for color in COLORS)
    assert all(frame.split("{}")[0] in said for frame in FRAMES)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_captions_is_flawed(world: World, scenes: Scenes, share: float) -> None:
    right = caption(world, scenes)
    changed = [
        a != b for a, b in zip(right, flawed(world, scenes, share, torch.Generator().manual_seed(3)), strict=True)
    ]
    most = 4 * (share * (1 - share) / len(scenes)) ** 0.5  # four deviations of a binomial share
    assert share * 0.9 - most <= sum(changed) / len(scenes) <= share + most  # a few silences are held-out prompts


def test_flaws_are_silent_or_wrong_as_asked(world: World, scenes: Scenes) -> None:
    colors = scenes.pick(scenes.category == CATEGORIES.index("colors"))
    silent = flawed(world, colors, 1.0, torch.Generator().manual_seed(3), silent=1.0)
    wrong = flawed(world, colors, 1.0, torch.Generator().manual_seed(3), silent=0.0)
    right = caption(world, colors)
    assert sum(any(color in text for color in COLORS) for text in silent) < 0.25 * len(colors)
    others = [text for text, true in zip(wrong, right, strict=True) if text != true]
    assert sum(any(color in text for color in COLORS) for text in others) > 0.7 * len(colors)


def test_alterations_change_what_is_asked(world: World, scenes: Scenes) -> None:
    changed = altered(world, scenes, torch.Generator().manual_seed(8))
    pairs = zip(metadata(world, scenes), metadata(world, changed), strict=True)
    keys = ("include", "word", "style")
    assert all({key: one.get(key) for key in keys} != {key: two.get(key) for key in keys} for one, two in pairs)
    assert torch.equal(changed.boxes, scenes.boxes)


def test_wrong_captions_never_say_a_held_out_combination(world: World, scenes: Scenes) -> None:
    """A caption that is neither right nor silent is that of an altered scene, which training may show."""
    generator = torch.Generator().manual_seed(6)
    said = flawed(world, scenes, 1.0, generator, silent=0.0)
    generator = torch.Generator().manual_seed(6)
    torch.rand(2, len(scenes), generator=generator)
    wrong = altered(world, scenes, generator)
    texts, allowed = caption(world, wrong), is_allowed(world, wrong, "train").tolist()
    assert not all(allowed)
    right = caption(world, scenes)
    for text, other, true, may in zip(said, texts, right, allowed, strict=True):
        assert may or text != other or text == true
