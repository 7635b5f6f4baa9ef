"""What Slurm refuses comes back as a sentence, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.pretend import PretendSlurm
from tests.slurm.test_fleet import flowfleet


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--partition", "gpu"], "invalid partition specified: gpu"),
        (["--gpus-per-node", "9"], "Requested node configuration is not available"),
        (["--nodes", "3"], "`sinfo` shows what there is"),
        (["--", "--no-such-option"], "no-such-option"),
    ],
    ids=["partition", "accelerators", "nodes", "option"],
)
def test_a_refused_job_is_told_in_slurms_words(
    slurm: PretendSlurm, folder: Path, options: list[str], said: str
) -> None:
    done = flowfleet("slurm", "up", "--state-dir", str(folder), *options)
    assert done.returncode == 1
    assert done.stderr.startswith("error: `sbatch")
    assert said in " ".join(done.stderr.split())
    assert not (folder / "slurm.json").exists()
