"""Checks the words of docstrings, comments, messages and pages: `python -m docs.lint.words [FILE …]`, in `make lint`.

    opening  a docstring begins with a verb or with the thing's own name, never with a preposition or pronoun (OPENINGS)
    banned   phrases that a reader has to translate (BANNED); each comes with words to use instead

Python files are parsed: docstrings, comments, and strings that contain a space. Other files are read as a whole,
without fenced code. Text in backticks quotes an API and is left alone. Spelling is codespell's, set in pyproject.toml.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

OPENINGS: Final = frozenset({"Of", "That", "For", "By", "Those", "With", "As", "Until"})
PRODUCT_OPENINGS: Final = OPENINGS | {"What", "Whether", "Who", "One", "All", "Every", "Any"}
"""Outside of tests."""
BANNED: Final = {
    "shall": "must, will, or the plain verb",
    "anew": "again",
    "beside": "besides, next to, with",
    "in vain": "without success, or say what failed",
    "(?:is|are|was|were|be|been|being) told": "gets, receives, knows; name who reports",
    "(?:is|are|was|were|be) away": "is unreachable, is restarting",
    "(?:go|goes|going|went|gone) on": "continues, resumes",
    "pass(?:es|ed|ing)? over": "skips, ignores",
    "nobody": "name who acts",
}
SUFFIXES: Final = frozenset({".py", ".md", ".toml", ".yaml", ".yml", ".tpl", ".sh", ".ts", ".proto", ".txt", ""})
SKIPPED: Final = re.compile(
    r"LICENSE|NOTICE|docs/lint/|tests/docs/test_words\.py|flowfleet/proto/|recipes/data/|bench/results/"
    r"|recipes/.*/prompts/|requirements/|examples/reward-node/package|services/controller/page/static/vendor/"
)
_GAP: Final = r"[\s#*/]+"
"""Words of a phrase may be parted by a line's end and the next comment's mark."""
_PHRASES: Final = "|".join("(" + phrase.replace(" ", _GAP) + ")" for phrase in BANNED)
_BANNED: Final = re.compile(rf"\b(?:{_PHRASES})\b", re.IGNORECASE)
_FENCE: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_QUOTED: Final = re.compile(r"`[^`\n]*`")


class Prose(NamedTuple):
    """A piece of prose and its first line."""

    line: int
    text: str
    is_docstring: bool = False


class Finding(NamedTuple):
    line: int
    message: str


def python_prose(source: str) -> Iterator[Prose]:
    """Docstrings, comments, and other strings with a space, of a module's source."""
    tree = ast.parse(source)
    docstrings = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Prose(node.lineno, node.value, node in docstrings)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Prose(token.start[0], token.string)


def findings_in(prose: Prose, openings: frozenset[str]) -> Iterator[Finding]:
    text = _QUOTED.sub(lambda quoted: "`" * len(quoted[0]), prose.text)
    opening = re.match(r"\W*(\w+)", text)
    if prose.is_docstring and opening and opening[1] in openings:
        yield Finding(prose.line, f'docstring opens with "{opening[1]}": begin with a verb or the thing\'s own name')
    for match in _BANNED.finditer(text):
        advice = [*BANNED.values()][match.lastindex - 1] if match.lastindex else ""
        line = prose.line + text.count("\n", 0, match.start())
        yield Finding(line, f'"{" ".join(match[0].split())}": say instead {advice}')


def findings(path: Path, source: str) -> list[Finding]:
    """Lists what to change in a file, by line."""
    if path.suffix == ".py":
        pieces = list(python_prose(source))
    else:
        pieces = [Prose(1, _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), source))]
    openings = OPENINGS if "tests" in path.parts else PRODUCT_OPENINGS
    return sorted(found for prose in pieces for found in findings_in(prose, openings))


def files() -> Iterator[Path]:
    """Files of the repository that people write."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        path = Path(name)
        if path.suffix in SUFFIXES and path.is_file() and not SKIPPED.match(name):
            yield path


def main(arguments: Sequence[str]) -> int:
    """Prints each finding; returns how many there are, at most 1."""
    failed = 0
    for path in map(Path, arguments) if arguments else files():
        for finding in findings(path, path.read_text(encoding="utf-8")):
            print(f"{path}:{finding.line}: {finding.message}")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
