"""Every relative link of a hand-written page leads to a file, and every anchor to a heading of its page."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "deploy/helm/**/*.md", "docker/*.md", "examples/*/*.md", "recipes/**/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The text of a page without blocks of code, whose brackets are no links."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```|^ {4}.*?$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    names: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#+ +(.*?) *#*$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(f"{name}-{names[name]}" if name in names else name)
        names[name] = names.get(name, 0) + 1
    return found


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere. Those with a scheme are not followed."""
    wrong = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_every_page_of_the_docs_is_reached_from_the_readme() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall(prose(ROOT / "README.md"))}
    pages = set((ROOT / "docs").glob("*.md"))
    assert sorted(path.name for path in pages - linked) == []


def test_broken_links_and_anchors_are_found(tmp_path: Path) -> None:
    other, page = tmp_path / "other.md", tmp_path / "page.md"
    other.write_text("# A `b`: c\n\n## Twice\n\n## Twice\n\n```\n# no heading\n[x](nothing.md)\n```\n")
    page.write_text(
        "[1](other.md#a-b-c) [2](other.md#twice-1) [3](https://a.b/#c) [4](#here)\n\n## Here\n\n"
        "[5](gone.md) [6](other.md#no-heading) [7](#there)\n"
    )
    assert broken(page) == ["gone.md", "other.md#no-heading", "#there"]
    assert broken(other) == []
