"""The scorer `pyiqa` against the library itself, in the environment that tests/packages makes."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from services.reward.scorers import make
from tests.services.reward.library_process import told_by


@pytest.mark.skipif(sys.modules.get("pyiqa") is not None, reason="the library is here")
def test_without_the_library_the_extra_is_named() -> None:
    with pytest.raises(ValueError, match=r"pip install .*\[reward-pyiqa\]"):
        make("pyiqa", {"metric": "musiq"}, 1)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return told_by("pyiqa", tmp_path_factory.mktemp("pyiqa"))


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
