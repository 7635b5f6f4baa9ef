"""The sbatch script."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowfleet.cli.main import app
from flowfleet.slurm.script import SlurmOptions, render


def script(**given: object) -> str:
    return render(SlurmOptions(**{"state_dir": Path("/shared/fleet"), **given}))  # type: ignore[arg-type]


def test_the_script_asks_for_what_the_options_say() -> None:
    text = script(nodes=4, gpus_per_node=8, partition="gpu", time="12:00:00", sbatch=("--mail-type=FAIL",))
    wanted = {
        "--nodes=4", "--gpus-per-node=8", "--partition=gpu", "--time=12:00:00", "--mail-type=FAIL", "--exclusive",
        "--requeue", "--signal=B:USR1@300", "--output=/shared/fleet/logs/slurm.log",
    }  # fmt: skip
    assert wanted <= {line.removeprefix("#SBATCH ") for line in text.splitlines()}


def test_words_are_quoted_for_the_shell(tmp_path: Path) -> None:
    text = script(up=("--model", "a b"), container="my image.sif", python=Path("/env/bin/python"))
    checked = tmp_path / "script.sh"
    checked.write_text(text.replace("exec ", "printf '%s\\n' "))
    done = subprocess.run(["bash", str(checked)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["--model", "a b"]
    assert "'apptainer exec --nv '\"'\"'my image.sif'" in text


def test_a_share_of_a_node_is_asked_for_by_its_cpus() -> None:
    assert "--exclusive" not in script(sbatch=("--cpus-per-task=16",))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--container", "a", "--container-image", "b"), "give one of them"),
        (("--", "mail"), "not 'mail'"),
        ((), "`sbatch` is not on PATH"),
    ],
    ids=["two containers", "not an option", "no Slurm"],
)
def test_bad_input_is_said_in_a_sentence(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(app, ["slurm", "up", "--state-dir", str(tmp_path / "fleet"), *words])
    assert done.exit_code == 1
    assert said in done.output


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["slurm", "up", "--state-dir", str(tmp_path / "file" / "fleet")])
    assert done.exit_code == 1
    assert "give another --state-dir" in done.output
