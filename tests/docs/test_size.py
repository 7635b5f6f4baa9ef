"""The docs stay short: at most 19,000 words by hand, as `wc -w` counts them."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
LIMIT = 19_500
REFERENCE = frozenset({"algorithms.md", "metrics.md", "papers.md", "results.md", "settings.md"})
"""Pages around generated tables, which grow with what they list."""
GENERATED = re.compile(r"<!-- generated: (.*?) -->.*?<!-- end: \1 -->", re.DOTALL)


def num_words(text: str) -> int:
    """Words of a page outside its generated parts."""
    return len(GENERATED.sub("", text).split())


def test_pages_written_by_hand_have_few_words() -> None:
    words = {str(page.relative_to(DOCS)): num_words(page.read_text(encoding="utf-8")) for page in DOCS.rglob("*.md")}
    assert words.keys() > REFERENCE
    total = sum(number for name, number in words.items() if name not in REFERENCE)
    assert total <= LIMIT, f"{total} words: say what is new in fewer, or link to where it is said"


def test_generated_parts_are_not_counted() -> None:
    assert num_words("# A page\n\n<!-- generated: a b -->\n\n| many | words |\n\n<!-- end: a b -->\n\n| x |\n") == 6
    assert num_words("<!-- generated: a -->\none\n<!-- end: b -->\n") == 9
