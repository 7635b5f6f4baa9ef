"""No tracker is imported before it is asked for, and one that is not installed says what to install."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flowfleet.cli.main import app
from flowfleet.extras import pip_install
from flowfleet.tracking.tracker import Histogram

TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")


def test_no_tracker_is_imported_at_start() -> None:
    code = f"import sys, flowfleet.cli.main, flowfleet.tracking.follower; print({{*sys.modules}} & {{*{TRACKERS!r}}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_missing_names_its_extra(name: str) -> None:
    code = (
        f"import sys; sys.modules[{name!r}] = None\n"
        "from pathlib import Path; from flowfleet.cli.track import _tracker\n"
        f"_tracker({name!r}, 'p', Path('x'), Path('y'))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert f"ValueError: {name} is not installed: {pip_install(name)}" in said


@pytest.mark.parametrize("flags", [[], ["--wandb", "--mlflow"]])
def test_one_tracker_is_asked_for(flags: list[str]) -> None:
    found = CliRunner().invoke(app, ["track", "x", *flags])
    assert found.exit_code
    assert "give one of --wandb, --tensorboard DIR, --mlflow and --trackio" in f"{found.output} {found.exception}"


def test_quantiles_are_those_of_the_bins() -> None:
    uniform = Histogram(0.0, 4.0, [5, 5, 5, 5])
    assert [uniform.quantile(part) for part in (0.0, 0.25, 0.5, 1.0)] == [0.0, 1.0, 2.0, 4.0]
    assert Histogram(0.0, 2.0, [0, 10]).quantile(0.5) == 1.5
    assert uniform.edges == [0.0, 1.0, 2.0, 3.0, 4.0]
