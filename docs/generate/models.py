"""The generated table of docs/models.md: the pairs of family and algorithm that `make test-all` runs.

`python -m docs.generate.models` rewrites it, in the directory of the repository. Free of torch.
"""

from collections.abc import Sequence
from pathlib import Path

from docs.generate.markdown import rewrite, table
from flowfleet.algorithms.registry import ALGORITHMS
from flowfleet.models.registry import FAMILIES, ModelFamily
from tests.e2e.matrix.choice import Case, run_cases

PAGE = Path("docs/models.md")


def parts() -> dict[str, str]:
    """Name to content of the generated part of the page."""
    rows = [_row(family, run_cases()) for family in FAMILIES.values()]
    return {"support": table(["model", "samples", "`make test-all` trains it by"], rows)}


def _row(family: ModelFamily, cases: Sequence[Case]) -> list[str]:
    samples = {"image": "pictures", "video": "videos", "text": "text"}[family.modality] + (
        ", from images" if family.takes_images else ", text" if family.writer else ""
    )
    run = {case.algorithm for case in cases if case.pipeline == family.pipeline}
    return [family.title, samples, ", ".join(f"`{name}`" for name in ALGORITHMS if name in run)]


if __name__ == "__main__":
    rewrite(PAGE, parts())
