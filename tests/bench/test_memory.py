"""Settings of published results are those of jobs, also where a file is older than an option."""

import json
from pathlib import Path
from typing import Any

from bench import loop, memory, report, train


def figures() -> list[dict[str, Any]]:
    files = map(json.loads, (path.read_text() for path in sorted(report.RESULTS.glob("*.json"))))
    return [figure for row in files for figure in row.get("figures", ())]


def test_every_published_loop_and_update_is_a_job_of_today() -> None:
    loops = [figure["settings"] for figure in figures() if figure.get("bench") == "loop"]
    updates = [figure for figure in figures() if "ms_per_row" in figure]
    assert len(loops) > 5
    assert len(updates) > 1
    for settings in loops:
        assert loop.job(memory._options(loop.flags(), settings), Path("m"))["trainer"]["mode"] == settings["mode"]
    for figure in updates:
        spec = train.bench_job(Path("m"), memory._options(train.flags(), figure), figure["world_size"])
        assert spec.trainer.mode == figure["mode"]
