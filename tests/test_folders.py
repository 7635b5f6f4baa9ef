"""Folders and files of code stay small enough to find one's way in."""

from collections import Counter
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parents[1]
CODE = ("flowfleet", "services", "recipes", "bench", "deploy", "docs", "examples")
GENERATED = ROOT / "flowfleet" / "proto"
MOST_MODULES = 15
MEDIAN_LINES, P95_LINES = 120, 300


def modules() -> list[Path]:
    """Python files, without tests, generated ones, and those that only open a package."""
    paths = [
        path for name in CODE for path in (ROOT / name).rglob("*.py") if "tests" not in path.parts[len(ROOT.parts) :]
    ]
    return [path for path in paths if path.name not in ("__init__.py", "__main__.py") and path.parent != GENERATED]


def test_no_folder_holds_more_than_fifteen_modules() -> None:
    found = Counter(path.parent for path in modules())
    assert len(found) > 50
    assert {str(folder): count for folder, count in found.items() if count > MOST_MODULES} == {}


def test_files_stay_short() -> None:
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in modules()]
    assert median(lines) <= MEDIAN_LINES
    assert quantiles(lines, n=20)[-1] <= P95_LINES
