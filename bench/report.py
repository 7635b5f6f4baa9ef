"""The report of a benchmark: the machine, a table, and a JSON file in bench/results.

A file has the machine, the command and a list of figures, one mapping per row of the table.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "diffusers", "transformers", "vllm", "vllm-omni")

Rows = Sequence[Mapping[str, Any]]
T = TypeVar("T")


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """A parser that prints the module's docstring as its help and has the option `--json`."""
    flags = argparse.ArgumentParser(
        prog=f"python -m bench.{name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--json", type=Path, help=f"where the figures go (bench/results/{name}.json)")
    return flags


def finish(name: str, options: argparse.Namespace, rows: Rows, columns: Sequence[str]) -> None:
    """Prints these columns of the rows, and writes all figures."""
    print(f"\n{table(rows, columns)}")
    write(name, options, rows)


def write(name: str, options: argparse.Namespace, rows: Rows) -> None:
    """Prints the machine and writes the file. Figures of a tiny run go to a file that git ignores, so that they never
    replace those of a real one."""
    tiny = "-tiny" if getattr(options, "tiny", False) else ""
    path = options.json or RESULTS / f"{name}{tiny}.json"
    about, command = machine(), " ".join([f"bench.{name}", *sys.argv[1:]])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": about, "command": command, "figures": list(rows)}, indent=1) + "\n")
    print("\n" + ", ".join(f"{key} {value}" for key, value in about.items()) + f"\n{path}", flush=True)


def table(rows: Rows, columns: Sequence[str]) -> str:
    """A Markdown table with aligned columns. A dotted column is a figure inside another one, as `train.update_s`."""
    cells = [[*columns], *([shown(_at(row, column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def shown(value: Any) -> str:
    """Four significant digits of a number; a dash for a missing figure."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def machine() -> dict[str, Any]:
    """Devices, usable cores, versions of what computes, and the commit of this code where git knows it."""
    names = list[str]()
    with contextlib.suppress(OSError):
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
        names = [line.split(":", 1)[1].partition("(UUID")[0].strip() for line in found.splitlines() if ":" in line]
    about: dict[str, Any] = {"devices": f"{len(names)} × {names[0]}" if names else "CPU"}
    about |= {"cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 1)}
    about["python"] = platform.python_version()
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            about[package] = metadata.version(package)
    return about | code_version(ROOT)


def code_version(directory: Path) -> dict[str, Any]:
    """The commit that is checked out there, and `dirty`, true if tracked files differ from it; empty without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "--short", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.CalledProcessError):
        return {}


def in_child(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a function of a module in a process of its own, whose memory on the device is free afterwards."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _at(row: Mapping[str, Any], column: str) -> Any:
    found: Any = row
    for name in column.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
