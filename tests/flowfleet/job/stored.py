"""Jobs as release 560f105e stored them.

`stored_jobs.json` was written by that release: the table that a job was submitted with, what was stored of it (what
differs from `whole`), and the digest of its Idempotency-Key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIXTURE: dict[str, Any] = json.loads((Path(__file__).parent / "stored_jobs.json").read_text())
JOBS, GONE = FIXTURE["jobs"], FIXTURE["gone"]
CHANGED = {"sources", "counted drops", "temp_flow_grpo with awm"}
"""Jobs whose files name a setting that is gone."""


def stored(entry: dict[str, Any]) -> dict[str, Any]:
    return _over(FIXTURE["whole"], entry["stored"])


def _over(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    tables = {
        name: _over(base[name], value) for name, value in patch.items() if name in base and isinstance(value, dict)
    }
    return base | patch | tables
