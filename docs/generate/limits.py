"""The tables of docs/operations.md: limits of what jobs may ask for, and of what stays of ended ones.

`python -m docs.generate.limits` rewrites them, in the directory of the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from docs.generate.fields import rows
from docs.generate.markdown import rewrite, table
from services.controller.limits import Limits
from services.controller.retention.keep import Keep

PAGE: Final = Path("docs/operations.md")


def parts() -> dict[str, str]:
    """Name to content of each generated part of the page."""
    head = ["limit", "default", "meaning"]
    return {"limits": table(head, rows(Limits)), "keep": table(head, rows(Keep))}


if __name__ == "__main__":
    rewrite(PAGE, parts())
