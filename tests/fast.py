"""Chooses the tests of `make test-fast`: those that touch neither torch nor a process. `pytest --fast`.

A file is left out unread where it, a conftest of its folders or a module that these import reaches torch or a way to
start processes. Of the others a test is left out that asks for a fixture with a process.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("flowfleet", "services", "tests", "recipes", "bench", "docs", "deploy", "examples")
HEAVY = {"torch", "diffusers", "transformers", "peft", "accelerate", "onnxruntime", "rapidocr", "cv2", "matplotlib"}
PROCESSES = re.compile(
    r"\b(torch|subprocess|create_subprocess_\w+|multiprocessing|ProcessPool|sys\.executable|playwright)\b"
)
"""Words of a test, or of a helper of tests, that starts processes or imports torch itself."""
FIXTURES = {"_redis_of_session", "forks"}
SLOW_MARKS = ("long", "cluster", "slurm")


def is_fast(path: Path) -> bool:
    """Reads the file alone."""
    folders = [folder / "conftest.py" for folder in path.parents if folder.is_relative_to(ROOT / "tests")]
    return not any(_is_heavy(file) for file in (path, *folders) if file.exists() and file.parent != ROOT / "tests")


@functools.cache
def _is_heavy(path: Path) -> bool:
    """Follows what is imported at the top of modules."""
    pending, seen = [path], set[Path]()
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen.add(file)
        text = file.read_text()
        if file.is_relative_to(ROOT / "tests") and file.name != "fast.py" and PROCESSES.search(text):
            return True
        for name in _imports(ast.parse(text)):
            if name.partition(".")[0] in HEAVY:
                return True
            pending += _files(name)
    return False


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files(name: str) -> list[Path]:
    """The files that an import of one of our modules runs; none for others."""
    parts = name.split(".")
    if parts[0] not in OURS:
        return []
    places = [ROOT.joinpath(*parts[:length]) for length in range(1, len(parts) + 1)]
    files = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py"))]
    return [file for file in files if file.is_file()]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="run only tests that touch neither torch nor a process")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--fast") or not collection_path.is_relative_to(ROOT / "tests"):
        return None
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    conftest = collection_path / "conftest.py"
    has_heavy = collection_path != ROOT / "tests" and conftest.exists() and _is_heavy(conftest)
    return True if has_heavy or (is_test and not is_fast(collection_path)) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--fast"):
        return
    fast = [item for item in items if not FIXTURES & {*getattr(item, "fixturenames", ())} and not _is_slow(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in {*fast}])
    items[:] = fast


def _is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(mark) for mark in SLOW_MARKS)
