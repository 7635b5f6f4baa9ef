"""The wrapper of a step: which accelerators its process sees, and how it reports the end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from flowfleet.slurm import step
from flowfleet.slurm.steps import Share, write_step


@pytest.mark.parametrize(
    ("given", "own", "shown"),
    [("4,5,6,7", (1, 3), "5,7"), ("0,1", (0,), "0"), ("", (0,), None)],
    ids=["shared node", "whole node", "no accelerator"],
)
def test_a_process_sees_its_own_accelerators(
    given: str, own: tuple[int, ...], shown: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    program = (
        f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'] + os.environ['A'])"
    )
    file = write_step(
        tmp_path, {"A": "!"}, {"n1": Share([sys.executable, "-c", program + "; raise SystemExit(3)"], own)}
    )
    assert file.stat().st_mode & 0o077 == 0
    assert step.main(str(file)) == 3
    assert (tmp_path / "seen").read_text() == (shown if shown is not None else given) + "!"
    assert (tmp_path / "step.n1").read_text() == "7.3"
    assert (tmp_path / "exit.n1").read_text() == "3"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == given
