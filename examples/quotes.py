"""Puts the files that docs/extending.md and docs/rewards.md show there, so that what a reader copies is what CI runs.

`python -m examples.quotes` does so, in the directory of the repository. A file is quoted where its path stands as the
name of a generated part.
"""

from __future__ import annotations

import re
from pathlib import Path

from docs.generate.markdown import rewrite

PAGE = Path("docs/extending.md")
REWARDS_PAGE = Path("docs/rewards.md")
_LANGUAGES = {".py": "python", ".toml": "toml", ".proto": "proto"}


def parts(root: Path, page: Path = PAGE) -> dict[str, str]:
    """Path to code block of each file that a page quotes. Raises OSError for one that is not there."""
    names = re.findall(r"<!-- generated: (\S+/\S+) -->", (root / page).read_text(encoding="utf-8"))
    return {name: _block(root / name) for name in names}


def _block(path: Path) -> str:
    return f"```{_LANGUAGES[path.suffix]}\n{path.read_text(encoding='utf-8')}```"


if __name__ == "__main__":
    for page in (PAGE, REWARDS_PAGE):
        rewrite(page, parts(Path(), page))
