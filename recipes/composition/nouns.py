"""Names of things: what `nouns.txt` lists, their plurals and articles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "nouns.txt"


@dataclass(frozen=True)
class Noun:
    """A thing: `name` in captions, `icon` in the packages of pictures, `plural` in captions of several."""

    name: str
    icon: str
    plural: str


def read_nouns() -> tuple[Noun, ...]:
    """The nouns of nouns.txt, in its order."""
    lines = [line.strip() for line in FILE.read_text().splitlines()]
    return tuple(_noun(line) for line in lines if line and not line.startswith("#"))


def article(words: str) -> str:
    """The words after "a" or "an"."""
    is_vowel = words.startswith(("a", "e", "i", "o", "u", "hour")) and not words.startswith(("unicorn", "ufo", "eu"))
    return f"{'an' if is_vowel else 'a'} {words}"


def _noun(line: str) -> Noun:
    name, *rest = (part.strip() for part in line.split(","))
    icon = rest[0] if rest else name.replace(" ", "-")
    return Noun(name, icon, rest[1] if len(rest) > 1 else f"{name}s")
