"""The checked-in stubs are what `protos/generate.sh` makes of the contracts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def stubs(folder: Path) -> dict[str, str]:
    return {
        path.name: path.read_text() for path in folder.iterdir() if path.name.split(".")[0].endswith(("_pb2", "_grpc"))
    }


def test_generated_stubs_match_the_contracts(tmp_path: Path) -> None:
    subprocess.run([ROOT / "protos" / "generate.sh", sys.executable, tmp_path], check=True, timeout=60)
    fresh, checked_in = stubs(tmp_path / "flowfleet" / "proto"), stubs(ROOT / "flowfleet" / "proto")
    contracts = [path.stem for path in (ROOT / "protos").rglob("*.proto")]
    assert len(fresh) == 4 * len(contracts) > 0
    assert sorted(fresh) == sorted(checked_in)
    different = [name for name in fresh if fresh[name] != checked_in[name]]
    assert not different, f"run `make protos`: {different} differ from protos/"
