"""The lint of words finds what it names, where it stands, and leaves quotes of an API alone."""

from pathlib import Path

import pytest

from docs.lint.words import BANNED, OPENINGS, PRODUCT_OPENINGS, findings, main


def found(source: str, name: str = "page.md") -> list[str]:
    """Findings in a source, as "LINE word"."""
    return [f"{line} {message.split(chr(34))[1]}" for line, message in findings(Path(name), source)]


@pytest.mark.parametrize("opening", sorted(PRODUCT_OPENINGS))
def test_a_docstring_opens_with_no_preposition_or_pronoun(opening: str) -> None:
    source = f'def size() -> int:\n    """{opening} a file."""\n\n\nLIMIT = 3\n"""{opening} a file."""\n'
    assert found(source, "code.py") == [f"2 {opening}", f"6 {opening}"]
    assert bool(found(source, "tests/code.py")) == (opening in OPENINGS)
    assert found('"""Size of a file."""\nTEXT = "Of a file"  # Of a file\n', "code.py") == []


@pytest.mark.parametrize(
    ("phrase", "text"),
    [
        ("shall", "It shall wait."),
        ("is told", "The rank is told."),
        ("been told", "The rank has been told."),
        ("goes on", "The job goes\non."),
        ("Nobody", "Nobody asks."),
        ("passed over", "Such files are passed over."),
        ("in vain", "It waits in vain."),
    ],
)
def test_a_banned_phrase_is_found_across_lines_and_cases(phrase: str, text: str) -> None:
    assert found(text) == [f"1 {phrase}"]
    line = text.replace("\n", " ")
    assert found(f'x = f"{{1}} {line}"\n', "code.py") == [f"1 {phrase}"]
    assert found(f"x = 1\n# {line}\n", "code.py") == [f"2 {phrase}"]


def test_code_and_words_that_contain_a_phrase_are_left_alone() -> None:
    assert found("Besides `beside`, a marshaller.\n\n```\nnobody\n```\n") == []
    assert found('beside = {"beside": 1, "nobody": 2}\n', "code.py") == []


def test_lines_are_counted_behind_a_fence() -> None:
    assert found("```\nnobody\n```\nnobody\n") == ["4 nobody"]


def test_each_phrase_has_words_to_use_instead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("It shall be made anew.\n")
    assert main([str(page)]) == 1
    assert capsys.readouterr().out == (
        f'{page}:1: "anew": say instead {BANNED["anew"]}\n{page}:1: "shall": say instead {BANNED["shall"]}\n'
    )
    page.write_text("It will be made again.\n")
    assert main([str(page)]) == 0
