"""What works with what: the generated table of docs/models.md, made of the registries and of the rules that a submitted
job has to pass.

`python -m flowfleet.support` rewrites it, in the directory of the repository. Free of torch. That a cell keeps its
promise is shown by tests/e2e/matrix, which runs each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from flowfleet.algorithms.registry import ALGORITHMS, Algorithm
from flowfleet.docs_tables import rewrite, table
from flowfleet.jobs import parse_job
from flowfleet.models.registry import FAMILIES, ModelFamily

PAGE = Path("docs/models.md")


def parts() -> dict[str, str]:
    """Name to content of the generated part of the page."""
    header = ["", "samples", *(f"`{name}`" for name in ALGORITHMS)]
    return {"support": table(header, [_row(family) for family in FAMILIES.values()])}


def refusal(family: ModelFamily, algorithm: Algorithm) -> str:
    """Why the least job of an algorithm on a family is refused; empty where it is taken."""
    job: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train": "data.jsonl"},
        "rewards": {"reward": {}},
        "algorithm": {"name": algorithm.name},
        "rollout": {"num_frames": 81 if family.modality == "video" else 1},
    }
    try:
        parse_job(job)
    except ValueError as error:
        return str(error)
    return ""


def _row(family: ModelFamily) -> list[str]:
    samples = ("videos" if family.modality == "video" else "pictures") + (
        ", from images" if family.takes_images else ""
    )
    cells = ["–" if refusal(family, algorithm) else "✓" for algorithm in ALGORITHMS.values()]
    return [f"{family.title}, `{family.pipeline}`", samples, *cells]


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE, parts())
