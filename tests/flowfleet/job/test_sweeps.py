"""Grids of settings: how values are written, which jobs they make, and which words name those that cannot run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.job.sweeps import asked_sweep, combinations, label, plan_sweep, values_by_setting

JOB: dict[str, Any] = {"name": "signs", "model": {"path": "m"}, "data": {"train": "p"}, "rewards": {"ocr": {}}}
SCALARS = st.one_of(st.integers(-99, 99), st.booleans(), st.floats(-1e3, 1e3).map(lambda value: round(value, 3)))
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.text("abc, [{'", max_size=5)
SETTINGS = st.dictionaries(
    st.sampled_from(["a", "b.c", "b.d", "e"]),
    st.lists(VALUES, min_size=1, max_size=4, unique_by=json.dumps),
    min_size=1,
).filter(lambda settings: any(len(values) > 1 for values in settings.values()))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-5,1e-4", [1e-5, 1e-4]),
        ("[1e-5, 1e-4]", [1e-5, 1e-4]),
        ("0..2", [0, 1, 2]),
        ("[-1..1,7]", [-1, 0, 1, 7]),
        ("[[1,2],[3,4]]", [[1, 2], [3, 4]]),
        ("[1,2],[3,4]", [[1, 2], [3, 4]]),
        ("[[1, 2]]", [[1, 2]]),
        ("[[[1,2],[3]],[[4]]]", [[[1, 2], [3]], [[4]]]),
        ("lora,full", ["lora", "full"]),
        ('"a, b", c', ["a, b", "c"]),
        ("{weight = 1, clip = [0, 1]}, {}", [{"weight": 1, "clip": [0, 1]}, {}]),
        ("true", [True]),
        ("job:1..2", ["job:1..2"]),
        ("1.5..2", ["1.5..2"]),
    ],
)
def test_values_are_read_as_documented(text: str, values: list[Any]) -> None:
    assert values_by_setting([f"x.y={text}"]) == {"x.y": values}


@given(st.lists(VALUES.filter(lambda value: not isinstance(value, str)), min_size=1, max_size=5))
def test_values_as_json_are_read_back(values: list[Any]) -> None:
    texts = [json.dumps(value) for value in values]
    assert values_by_setting(["k=[" + ",".join(texts) + "]"]) == {"k": values}
    if len(values) > 1:
        assert values_by_setting(["k=" + ", ".join(texts)]) == {"k": values}


@given(SETTINGS)
def test_a_grid_has_each_combination_once_and_the_last_setting_changes_first(settings: dict[str, list[Any]]) -> None:
    rows = combinations(settings)
    expected: list[dict[str, Any]] = [{}]
    for key, values in settings.items():
        expected = [{**row, key: value} for row, value in itertools.product(expected, values)]
    assert rows == expected


@given(SETTINGS, st.integers(2, 4))
def test_zipped_settings_go_together(settings: dict[str, list[Any]], length: int) -> None:
    zipped: dict[str, list[Any]] = {
        key: [values[0]] if number % 2 else [[number, at] for at in range(length)]
        for number, (key, values) in enumerate(settings.items())
    }
    rows = combinations(zipped, zipped=True)
    assert rows == [{key: v[at] if len(v) > 1 else v[0] for key, v in zipped.items()} for at in range(length)]


@pytest.mark.parametrize(
    ("settings", "zipped", "message"),
    [
        ({"seed": range(10_000)}, False, "10,000 jobs: a sweep has at most 500"),
        ({"seed": range(100), "x": range(100)}, False, "10,000 jobs: a sweep has at most 500"),
        ({"seed": [1, 2], "x": [1, 2, 3]}, True, "and zipped settings equally many"),
        ({"seed": [1, 1]}, False, "seed: give at least one value, and each once"),
        ({"seed": []}, False, "seed: give at least one value"),
        ({"seed": 1}, False, "give a setting several values"),
        ({}, False, "give a setting several values"),
    ],
)
def test_what_is_no_sweep_is_refused(settings: Mapping[str, Any], zipped: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        combinations(settings, zipped=zipped)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["seed"], "write all values of a setting as key=values"),
        (["=1"], "write all values of a setting as key=values"),
        (["seed=1", "seed=2"], "--set seed=2: write all values of a setting"),
        (["seed=0..999999999999"], "1,000,000,000,000 jobs: a sweep has at most 500"),
    ],
)
def test_unreadable_changes_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        values_by_setting(changes)


def test_jobs_keep_the_settings_in_which_they_differ() -> None:
    rows = combinations({"trainer.optimizer.lr": [1e-5, 1e-4], "seed": range(2), "schedule.steps": 3})
    jobs = plan_sweep({"name": "lr", "at_once": 2, "job": JOB, "settings": rows})
    assert [label(part.settings) for part, _ in jobs] == [
        "trainer.optimizer.lr=1e-05 seed=0",
        "trainer.optimizer.lr=1e-05 seed=1",
        "trainer.optimizer.lr=0.0001 seed=0",
        "trainer.optimizer.lr=0.0001 seed=1",
    ]
    assert [(spec.trainer.optimizer.lr, spec.seed, spec.schedule.steps) for _, spec in jobs] == [
        (lr, seed, 3) for lr in (1e-5, 1e-4) for seed in (0, 1)
    ]
    assert {(part.name, part.at_once) for part, _ in jobs} == {("lr", 2)}
    assert JOB["name"] == "signs"
    assert "seed" not in JOB


def test_a_problem_names_the_jobs_that_have_it() -> None:
    rows = combinations({"trainer.optimizer.lr": [1e-5, 2.0], "seed": [0, 1]})
    with pytest.raises(ValueError, match="less than 1") as raised:
        plan_sweep({"name": "lr", "job": JOB, "settings": rows})
    (line,) = str(raised.value).split("\n")
    assert line.endswith("(trainer.optimizer.lr=2.0 seed=0; trainer.optimizer.lr=2.0 seed=1)")
    with pytest.raises(ValueError, match="did you mean seed") as raised:
        plan_sweep({"name": "lr", "job": JOB, "settings": combinations({"sede": range(400)})})
    assert str(raised.value).endswith("(sede=0; sede=1; sede=2; …)")
    assert "\n" not in str(raised.value)


def test_the_same_sweep_has_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "job.json"
    file.write_text(json.dumps(JOB))
    (tmp_path / "a.txt").touch()

    def asked(*names: str, **settings: Any) -> dict[str, Any]:
        return asked_sweep(file, {"seed": [0, 1], **settings}, zipped=False, name="".join(names), same_machine=True)

    assert asked()["name"] == asked()["name"]
    assert asked()["name"].startswith("signs-")
    long = asked_sweep({**JOB, "name": "x" * 63}, {"seed": [0, 1]}, zipped=False, name="", same_machine=False)
    assert len(plan_sweep(long)[0][0].name) == 63
    assert asked()["name"] != asked(**{"schedule.steps": 3})["name"]
    assert asked("mine")["name"] == "mine"
    rows = asked(**{"data.train": ["a.txt", "no.txt"]})["settings"]
    assert [row["data.train"] for row in rows[:2]] == [str(tmp_path / "a.txt"), "no.txt"]
