"""Files of code stay short."""

from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parents[1]
CODE = ("flowfleet", "services", "recipes", "bench", "deploy", "docs", "examples")
GENERATED = ROOT / "flowfleet" / "proto"
MEDIAN_LINES, P95_LINES = 120, 300


def modules() -> list[Path]:
    """Python files, without tests, generated ones, and those that only open a package."""
    paths = [
        path for name in CODE for path in (ROOT / name).rglob("*.py") if "tests" not in path.parts[len(ROOT.parts) :]
    ]
    return [path for path in paths if path.name not in ("__init__.py", "__main__.py") and path.parent != GENERATED]


def test_files_stay_short() -> None:
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in modules()]
    assert median(lines) <= MEDIAN_LINES
    assert quantiles(lines, n=20)[-1] <= P95_LINES
