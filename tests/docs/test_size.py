"""The docs stay short: at most 40,000 words, as `wc -w` counts them."""

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
LIMIT = 40_000


def test_the_pages_have_few_words() -> None:
    words = {str(page.relative_to(DOCS)): len(page.read_text(encoding="utf-8").split()) for page in DOCS.rglob("*.md")}
    assert "settings.md" in words
    assert sum(words.values()) <= LIMIT, f"{words}: say what is new in fewer words, or link to where it is said"
