"""The scale rehearsal: one controller among very many replicas and jobs.

    python -m bench.scale [--replicas 1000] [--jobs 100] [--seconds 120] [--json FILE] [--profile FILE]

Prints a table; figures of several runs are in docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import pstats
import resource
import shutil
import sys
import tempfile
from pathlib import Path

from bench.scale import figures, load
from bench.scale.rehearsal import rehearse


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    load.add_flags(parser)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--profile", type=Path, help="run the controller under cProfile and write its statistics here")
    parser.add_argument("--keep", type=Path, help="copy logs and notes of the processes there")
    options = parser.parse_args()
    try:
        wanted = load.from_flags(options)
    except ValueError as error:
        parser.error(str(error))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = rehearse(wanted, Path(folder) / "run", options.profile is not None)
        finally:
            if options.keep:
                shutil.copytree(Path(folder) / "run", options.keep, dirs_exist_ok=True)
        if options.profile and (Path(folder) / "run" / "controller.prof").exists():
            shutil.copy(Path(folder) / "run" / "controller.prof", options.profile)
            pstats.Stats(str(options.profile)).sort_stats("tottime").print_stats(45)
    print(figures.table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
