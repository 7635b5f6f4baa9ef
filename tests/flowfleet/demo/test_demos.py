"""`flowfleet demo` as a command: the job that it runs, and what it says of demos that it does not have."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowfleet.cli.main import app
from flowfleet.demo import run
from flowfleet.job.files import find_job_file


@pytest.mark.parametrize(("flags", "recipe"), [([], "tiny_ocr"), (["--recipe", "tiny_video"], "tiny_video")])
def test_the_command_runs_the_recipe_with_the_users_settings(
    flags: list[str], recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(run, "run_demo", lambda *arguments: asked.extend(arguments))
    arguments = ["demo", *flags, "--set", "schedule.steps=2", "--seed", "5", "--state-dir", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert asked[:3] == [Path(recipe), tmp_path, ["schedule.steps=2", "seed=5"]]


@pytest.mark.parametrize(
    ("name", "said"), [("composition", "checkout of commit 560f105e"), ("sings", "the demo is signs")]
)
def test_a_demo_that_is_not_here_is_refused_with_what_to_do(name: str, said: str) -> None:
    done = CliRunner().invoke(app, ["demo", name])
    assert done.exit_code != 0
    assert said in " ".join(done.output.split())


def test_a_recipe_of_the_removed_study_is_refused_with_where_it_is() -> None:
    with pytest.raises(ValueError, match=r"composition_full: this recipe has left Flowfleet: .* commit 560f105e"):
        find_job_file(Path("composition_full"))
