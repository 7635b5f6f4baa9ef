"""Prompts: files, and which prompt a step gets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.controller.data import Prompt, load_prompts, prompts_of_step


def test_text_files_have_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('A sign that says "K7"\n\n  Ünïcode „Grüße“  \n', encoding="utf-8")
    assert load_prompts(str(path)) == [Prompt('A sign that says "K7"'), Prompt("Ünïcode „Grüße“")]


def test_jsonl_files_carry_metadata(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "two cats", "metadata": {"count": 2}}\n{"prompt": "a dog"}\n')
    assert load_prompts(str(path)) == [Prompt("two cats", {"count": "2"}), Prompt("a dog")]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.txt", "\n \n", "holds no prompt"),
        ("broken.jsonl", '{"prompt": "a"}\n{nonsense', "broken.jsonl:2: expected an object"),
        ("list.jsonl", "[1]", "list.jsonl:1: expected an object"),
        ("no_prompt.jsonl", '{"text": "a"}', "no_prompt.jsonl:1: expected an object"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.txt: prompts cannot be read"):
        load_prompts(str(tmp_path / "absent.txt"))


@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 2**40))
def test_each_pass_gives_every_prompt_once(num_prompts: int, count: int, seed: int) -> None:
    prompts = [Prompt(str(k)) for k in range(num_prompts)]
    steps = num_prompts  # num_prompts · count prompts: `count` whole passes
    dealt = [prompt.text for step in range(steps) for prompt in prompts_of_step(prompts, seed, step, count)]
    assert Counter(dealt) == {prompt.text: count for prompt in prompts}
    assert len(set(dealt[:num_prompts])) == num_prompts
    assert [p.text for p in prompts_of_step(prompts, seed, steps - 1, count)] == dealt[-count:]
