"""What trainers leave aside: each has names of its own, and what nobody writes to any more goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from services.trainer.checkpoints import STALE_S, Checkpoints


def test_two_trainers_of_a_job_write_aside_under_other_names(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, "job", 1).token != Checkpoints(tmp_path, "job", 1).token


def test_only_what_another_may_still_finish_is_left_aside(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "job", 1, token="ours")
    kept = [".step-00000012.theirs.partial", "step-00000008", "notes"]
    gone = [
        ".step-00000008.partial",
        ".step-00000007.theirs.partial",
        ".step-00000013.ours.partial",
        ".step-00000014.old.partial",
    ]
    for name in kept + gone:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    long_ago = time.time() - 2 * STALE_S
    for path in (tmp_path / gone[-1] / "file", tmp_path / gone[-1]):
        os.utime(path, (long_ago, long_ago))
    checkpoints._clean(8)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
