"""The scorer `pyiqa` against the library itself, in the environment that tests/packages makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.reward.scorers import make

ROOT = Path(__file__).parents[3]
LIBRARY = Path(os.environ.get("FLOWFLEET_SCORERS", ROOT / ".venv-scorers")) / "pyiqa"


@pytest.mark.skipif(sys.modules.get("pyiqa") is not None, reason="the library is here")
def test_without_the_library_the_extra_is_named() -> None:
    with pytest.raises(ValueError, match=r"install flowfleet\[reward-pyiqa\]"):
        make("pyiqa", {"metric": "musiq"}, 1)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not LIBRARY.is_dir():
        pytest.skip(f"needs pyiqa in {LIBRARY}: run tests/packages")
    folder = tmp_path_factory.mktemp("pyiqa")
    command = [sys.executable, "-m", "tests.services.reward.pyiqa_process", str(folder)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{LIBRARY}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.long
@pytest.mark.parametrize(("metric", "sign"), [("piqe", -1), ("entropy", 1), ("cnniqa", 1)])
def test_scores_are_the_librarys(told: dict[str, Any], metric: str, sign: int) -> None:
    found = told[metric]
    assert found["metric"] == pytest.approx(found["library"], rel=1e-5, abs=1e-6)
    assert found["scores"] == [sign * value for value in found["metric"]]
    assert len(set(found["library"])) > 1, "pictures that it tells apart"


@pytest.mark.long
def test_weights_are_files_of_the_folder_and_run_no_code(told: dict[str, Any]) -> None:
    assert "settings.weights lacks pyiqa/CNNIQA_koniq10k" in told["missing"]
    assert "https://" in told["missing"]
    assert "cannot be made" in told["pickle"]
    assert told["harmed"] is False
    assert told["cnniqa"]["version"] != told["piqe"]["version"]
    assert "take a metric without reference" in told["unknown"]
