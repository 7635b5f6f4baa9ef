"""The figures of docs/results.md from what the benches printed.

    python -m bench.performance [results.json …]

Files that `bench.h200` wrote are taken into bench/results, a file a row, where a later measurement replaces an earlier
one and a failed one is dropped; then the page's tables are made of all that is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.performance_tables import parts
from docs.generate.markdown import rewrite

PAGE = Path("docs/results.md")
RESULTS = Path("bench/results")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.performance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="results.json of bench.h200")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    for file in options.files:
        for problem in take(json.loads(file.read_text()), options.results):
            print(problem)
    rewrite(options.page, parts(read_all(options.results)))
    return 0


def take(measured: Mapping[str, Any], directory: Path) -> list[str]:
    """Writes a file for each row that printed figures; what it says of the others."""
    directory.mkdir(parents=True, exist_ok=True)
    problems = []
    for name, row in measured["rows"].items():
        figures = [*figures_in(row["printed"])]
        if not row["outcome"].startswith("done") or not figures:
            problems.append(f"{name}: {row['outcome']}, {len(figures)} figures: not taken")
            continue
        kept = {"machine": measured["machine"], "command": row["command"], "gpus": row["gpus"], "figures": figures}
        (directory / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    return problems


def figures_in(printed: list[str]) -> list[dict[str, Any]]:
    """Lines of JSON, and rows of Markdown tables by their headings."""
    found, heading = list[dict[str, Any]](), list[str]()
    for line in printed:
        if line.startswith("{"):
            found.append(json.loads(line))
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not heading:
                heading = cells
            elif not set(line) <= set("|-: "):
                found.append(dict(zip(heading, cells, strict=True)))
        else:
            heading = []
    json_rows = [row for row in found if "bench" in row or "world_size" in row]
    return json_rows or found


def read_all(directory: Path) -> dict[str, dict[str, Any]]:
    """Rows by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}


if __name__ == "__main__":
    sys.exit(main())
