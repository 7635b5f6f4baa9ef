"""Parts of Markdown pages that are generated from the code, so that they cannot fall behind it.

A generated part stands between two comments, `<!-- generated: name -->` and `<!-- end: name -->`. A module that
generates parts is a command that calls `rewrite`, and a test asks `outdated` whether somebody forgot to run it.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars and line ends inside cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def outdated(path: Path, parts: Mapping[str, str]) -> list[str]:
    """Names of the parts of a page that are not as they should be."""
    text = path.read_text(encoding="utf-8")
    return [name for name, content in parts.items() if replaced(text, name, content) != text]


def rewrite(path: Path, parts: Mapping[str, str]) -> None:
    """Puts parts by name into a page. Raises ValueError, and writes nothing, where a page has no place for one."""
    text = path.read_text(encoding="utf-8")
    for name, content in parts.items():
        text = replaced(text, name, content)
    path.write_text(text, encoding="utf-8")


def content(text: str, name: str) -> str:
    """Returns the present content of a generated part of a page; empty if the page has no such part."""
    return text.partition(f"<!-- generated: {name} -->")[2].partition(f"<!-- end: {name} -->")[0].strip()


def replaced(text: str, name: str, content: str) -> str:
    """A page's text with other content between the comments of one part."""
    start, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    before, has_start, rest = text.partition(start)
    _, has_end, after = rest.partition(end)
    if not has_start or not has_end:
        raise ValueError(f"the page has no part {name}: add the lines {start} and {end} where it belongs")
    return f"{before}{start}\n\n{content}\n\n{end}{after}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
