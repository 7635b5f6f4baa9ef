"""Settings are strict: each kind of scalar, in every table, and the words of what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError

import services.controller.app
import services.reward.scorers.image_quality  # noqa: F401, a scorer with settings
from flowfleet import part
from flowfleet.job.setting_files import read_table
from flowfleet.job.spec import parse_job
from flowfleet.part import Part, in_words, rule
from services.controller.api.routes.history import EVENT_ID, SAMPLE_CURSOR

JOB = {"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}}
WRONG: dict[Any, tuple[Any, ...]] = {
    int: (True, "3", 2.5, 3.0),
    float: (True, "1.0", "1e-3"),
    bool: (1, 0, "true", "yes"),
    str: (3, 1.5, False),
}
NAMES: dict[Any, str] = {int: "int", float: "float", bool: "bool", str: "string"}
"""Names of the types in pydantic's errors."""


def tables(base: type[BaseModel] = Part) -> Iterator[type[BaseModel]]:
    for table in base.__subclasses__():
        yield table
        yield from tables(table)


def test_no_table_takes_a_scalar_of_another_type() -> None:
    fields = [(table, name, field) for table in tables() for name, field in table.model_fields.items()]
    scalars = [(table, name, kind) for table, name, field in fields for kind in WRONG if field.annotation is kind]
    assert len(scalars) > 100
    for table, name, kind in scalars:
        key = table.model_fields[name].alias or name
        for wrong in WRONG[kind]:
            with pytest.raises(ValidationError) as refused:
                table.model_validate({key: wrong})
            found = [item["type"] for item in refused.value.errors() if item["loc"][:1] == (key,)]
            assert found, (table, name, wrong)
            assert found[0].startswith(f"{NAMES[kind]}_"), (table, name, wrong, found)


class Table(Part):
    many: int = 1
    lr: float = 1.0
    on: bool = True
    label: str = Field(default="x", pattern=rule("^[a-z]+$", "give lowercase letters"))
    pairs: tuple[tuple[int, float], ...] = ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"many": True}, "true is not a whole number"),
        ({"many": 2.5}, "2.5 is not a whole number"),
        ({"many": "3"}, "'3' is not a whole number: write it without quotes"),
        ({"lr": "1e-3"}, "'1e-3' is not a number: write it without quotes; YAML needs a dot and a sign, as in 1.0e-3"),
        ({"lr": "fast"}, "'fast' is not a number"),
        ({"on": 1}, "1 is not true or false"),
        ({"label": None}, "null is not a text"),
        ({"label": "X"}, "'X': give lowercase letters"),
        ({"pairs": [[0, "1.0"]]}, "'1.0' is not a number: write it without quotes"),
    ],
)
def test_what_is_wrong_is_said_in_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Table.model_validate(given)
    assert in_words(refused.value.errors()[0]).startswith(words)


def test_lists_and_whole_numbers_are_taken_as_files_have_them() -> None:
    assert Table.model_validate({"lr": 1, "pairs": [[0, 1]]}) == Table(lr=1.0, pairs=((0, 1.0),))


def test_a_job_names_the_setting_and_the_rule() -> None:
    wrong = {"name": "Signs_v1", "seed": True, "schedule": {"steps": True}, "rewards": {"ocr": {"weight": "1.0"}}}
    with pytest.raises(ValueError, match="schedule") as refused:
        parse_job({**JOB, **wrong})
    assert sorted(str(refused.value).split("\n")) == [
        "name: 'Signs_v1': give up to 63 lowercase letters, digits and '-', a letter or digit first and last",
        "rewards.ocr.weight: '1.0' is not a number: write it without quotes; YAML needs a dot and a sign, as in 1.0e-3",
        "schedule.steps: true is not a whole number",
        "seed: true is not a whole number",
    ]


def test_every_pattern_of_the_rest_api_has_words() -> None:
    page = Path(__file__).parents[1] / "services/controller/openapi.json"
    found = set(re.findall(r'"pattern": ("(?:[^"\\]|\\.)*")', page.read_text(encoding="utf-8")))
    assert len(found) > 5
    by_handlers = {EVENT_ID["pattern"], SAMPLE_CURSOR["pattern"]}
    assert {json.loads(pattern) for pattern in found} - by_handlers <= part._RULES.keys()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"seed": 1, "seed": 2}'),
        ("a.json", '{"data": {"train": "a", "seed": 1, "seed": 1}}'),
        ("a.yaml", "seed: 1\nname: x\nseed: 2\n"),
        ("a.yml", "data: {train: a, seed: b, seed: c}\n"),
        ("a.yaml", "- seed: 1\n  seed: 1\n"),
        ("a.toml", "seed = 1\nseed = 2\n"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}: not valid .*(seed|overwrite)"):
        read_table(tmp_path / name, "a job")


def test_yaml_may_merge_mappings(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: &base {a: 1, b: 2}\nown:\n  <<: *base\n  b: 3\n")
    assert read_table(tmp_path / "a.yaml", "a job")["own"] == {"a": 1, "b": 3}
