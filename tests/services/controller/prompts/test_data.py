"""Prompts: files, and which prompt a step gets."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.limits import MAX_IMAGES, MAX_METADATA_BYTES, MAX_PROMPT_BYTES
from flowfleet.seeds import derive_seed
from services.controller.prompts import data
from services.controller.prompts.data import Deal, Kind, Prompt, media_type, parse_prompts


def load_prompts(path: str, kind: Kind = "prompts") -> list[Prompt]:
    return parse_prompts(Path(path).read_bytes(), path, kind)


def test_text_files_have_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('A sign that says "K7"\n\n  Ünïcode „Grüße“  \n', encoding="utf-8")
    assert load_prompts(str(path)) == [Prompt('A sign that says "K7"'), Prompt("Ünïcode „Grüße“")]


def test_jsonl_files_carry_metadata(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "two cats", "metadata": {"count": 2}}\n{"prompt": "a dog"}\n')
    assert load_prompts(str(path)) == [Prompt("two cats", {"count": "2"}), Prompt("a dog")]
    path.write_text('{"prompt": "a cat", "metadata": {"of": {"class": "cat", "more": [1, null]}}}\n')
    assert load_prompts(str(path)) == [Prompt("a cat", {"of": '{"class": "cat", "more": [1, null]}'})]


def test_media_lie_beside_the_file_unless_they_say_where(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        '{"prompt": "a", "chosen": "x/1.png", "rejected": "/data/2.JPG", "images": ["3.webp"]}\n\n'
        '{"prompt": "b", "chosen": "s3://bucket/1.mp4", "rejected": "2.mp4", "metadata": {"n": 1}}\n'
    )
    first, second = load_prompts(str(path), "preferences")
    assert first.media == (f"{tmp_path}/x/1.png", "/data/2.JPG")
    assert first.images == (f"{tmp_path}/3.webp",)
    assert second == Prompt("b", {"n": "1"}, media=("s3://bucket/1.mp4", f"{tmp_path}/2.mp4"))
    assert [prompt.source for prompt in (first, second)] == [f"{path}:1", f"{path}:3"]
    assert load_prompts(str(path))[0].media == ()  # prompts without pairs have no media


def test_a_file_named_without_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("edits.jsonl").write_text('{"prompt": "a", "images": ["a.png"]}')
    assert load_prompts("edits.jsonl")[0].images == ("a.png",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "chosen": "1.png"}', 'bad.jsonl:1: expected an object like {"prompt": "…", "chosen"'),
        ('{"prompt": "a", "chosen": "1.png", "rejected": 2}', "bad.jsonl:1: expected an object"),
        ('{"prompt": "a", "chosen": "1.gif", "rejected": "2.png"}', "bad.jsonl:1: 1.gif: its suffix tells no media"),
        ('{"prompt": "a", "chosen": "1.png", "rejected": "2.png", "images": "3.png"}', "bad.jsonl:1: expected"),
        ('{"prompt": "a", "chosen": "1.png", "rejected": "2.png", "images": ["3"]}', "bad.jsonl:1: 3: its suffix"),
    ],
)
def test_bad_preferences_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_prompts(str(path), "preferences")


def test_preferences_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a")
    with pytest.raises(ValueError, match=r"preferences come as \.jsonl"):
        load_prompts(str(tmp_path / "p.txt"), "preferences")


def test_types_go_by_suffix() -> None:
    assert [media_type(f"a.{s}") for s in ("png", "jpg", "JPEG", "webp", "mp4")] == [
        "image/png", "image/jpeg", "image/jpeg", "image/webp", "video/mp4",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["prompts", "preferences"])
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.jsonl", "\n \n", "holds no prompt"),
        (
            "broken.jsonl",
            '{"prompt": "a", "chosen": "1.png", "rejected": "2.png"}\n{nonsense',
            "broken.jsonl:2: expected an object",
        ),
        ("list.jsonl", "[1]", "list.jsonl:1: expected an object"),
        ("no_prompt.jsonl", '{"text": "a"}', "no_prompt.jsonl:1: expected an object"),
        (
            "half.jsonl",
            '{"prompt": "a", "chosen": "1.png", "rejected": "2.png", "metadata": {"note": "\\ud800"}}',
            "half.jsonl:1: holds half of a surrogate pair",
        ),
        ("deep.jsonl", '{"prompt": ' + "[" * 100_000, "deep.jsonl:1: it is nested too deeply"),
        (
            "long.jsonl",
            json.dumps({"prompt": "é" * (MAX_PROMPT_BYTES // 2 + 1), "chosen": "1.png", "rejected": "2.png"}),
            f"long.jsonl:1: the prompt has {MAX_PROMPT_BYTES + 2} bytes: give at most {MAX_PROMPT_BYTES}",
        ),
        (
            "metadata.jsonl",
            json.dumps(
                {"prompt": "a", "chosen": "1.png", "rejected": "2.png", "metadata": {"k": "x" * MAX_METADATA_BYTES}}
            ),
            f"metadata.jsonl:1: metadata has {MAX_METADATA_BYTES + 1} bytes",
        ),
        (
            "images.jsonl",
            json.dumps({"prompt": "a", "chosen": "1.png", "rejected": "2.png", "images": ["1.png"] * (MAX_IMAGES + 1)}),
            f"images.jsonl:1: {MAX_IMAGES + 1} images: give at most {MAX_IMAGES}",
        ),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, name: str, text: str, message: str, kind: Kind) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path), kind)


def test_a_long_line_of_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("a\n" + "x" * MAX_PROMPT_BYTES + "\n" + "x" * (MAX_PROMPT_BYTES + 1))
    with pytest.raises(ValueError, match=r"long\.txt:3: the prompt has 32769 bytes: give at most 32768"):
        load_prompts(str(path))


@pytest.mark.parametrize("line", [b"a\n", b"a\r", "a\u2028".encode()])
def test_many_short_lines_are_refused_before_they_are_made(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_PROMPTS", 3)
    assert len(parse_prompts(3 * line, "x.txt")) == 3
    with pytest.raises(ValueError, match=r"x\.txt: a prompt file has at most 3 lines"):
        parse_prompts(4 * line, "x.txt")


def test_an_empty_text_holds_no_prompt(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="holds no prompt"):
        load_prompts(str(tmp_path / "empty.txt"))


@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 2**40))
def test_each_pass_gives_every_prompt_once(num_prompts: int, count: int, seed: int) -> None:
    prompts = [Prompt(str(k)) for k in range(num_prompts)]
    steps = num_prompts  # num_prompts · count prompts: `count` whole passes
    deal = Deal(prompts, seed, count)
    dealt = [prompt.text for step in range(steps) for prompt in deal.of_step(step)]
    assert Counter(dealt) == {prompt.text: count for prompt in prompts}
    assert len(set(dealt[:num_prompts])) == num_prompts
    assert [p.text for p in Deal(prompts, seed, count).of_step(steps - 1)] == dealt[-count:]


@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 2**40), st.lists(st.integers(0, 200), max_size=8))
def test_the_order_is_the_one_of_the_seed_whatever_was_asked_before(
    num_prompts: int, count: int, seed: int, steps: list[int]
) -> None:
    """The formula, prompt by prompt: place k of a pass is entry k of a permutation that the pass's own seed draws."""

    def nth(place: int) -> str:
        number, offset = divmod(place, num_prompts)
        return str(np.random.default_rng(derive_seed(seed, "epoch", number)).permutation(num_prompts)[offset])

    deal = Deal([Prompt(str(k)) for k in range(num_prompts)], seed, count)
    for step in steps:
        assert [p.text for p in deal.of_step(step)] == [nth(step * count + k) for k in range(count)]


def test_a_step_of_a_million_prompts_is_shuffled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []

    def shuffled(deal: Deal, number: int, original: Any = Deal._shuffled) -> Any:
        passes.append(number)
        return original(deal, number)

    monkeypatch.setattr(Deal, "_shuffled", shuffled)
    deal = Deal([Prompt("a sign")] * 1_000_000, 7, 512)
    for step in (0, 0, 1, 1952, 1953, 1954, 0, 1953):  # a pass ends in step 1953
        assert len(deal.of_step(step)) == 512
    assert passes == [0, 1]
