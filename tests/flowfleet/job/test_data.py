"""The data of a job as settings: one file, or several sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowfleet.job.files import data_folders, prepare_job
from flowfleet.job.spec import JobSpec, parse_job

SIGNS: dict[str, Any] = {"name": "signs", "path": "signs.txt", "rewards": {"ocr": 1.0}}
SCENES: dict[str, Any] = {"name": "scenes", "path": "scenes.csv", "weight": 3}


def job(data: dict[str, Any], rewards: dict[str, Any] | None = None, **parts: Any) -> JobSpec:
    rewards = {"ocr": {}, "aesthetic": {"weight": 0.5}} if rewards is None else rewards
    return parse_job({"model": {"path": "m"}, "rewards": rewards, "data": data, **parts})


def test_sources_have_rewards_and_settings_of_their_own() -> None:
    part = job({"sources": [SIGNS, SCENES | {"validation": "held.txt"}], "ignore_columns": ["id"]}).data
    signs, scenes = part.each
    assert (signs.setting, scenes.setting) == ("data.sources.0.path", "data.sources.1.path")
    assert signs.columns.prompt == scenes.columns.prompt == "prompt"
    assert signs.columns.ignored == scenes.columns.ignored == {"id"}
    assert [place for _, place, _ in scenes.files("prompts")] == ["scenes.csv", "held.txt"]
    assert part.held_out == (scenes,)
    assert part.is_validated


def test_a_source_scores_with_its_rewards_and_a_factor_of_their_weight() -> None:
    spec = job({"sources": [SIGNS | {"rewards": {"ocr": 2.0, "aesthetic": 0.2}}, SCENES]})
    own = spec.data.scoring("signs", spec.rewards)
    assert {name: part.weight for name, part in own.items()} == {"ocr": 2.0, "aesthetic": pytest.approx(0.1)}
    assert spec.data.scoring("scenes", spec.rewards) == spec.rewards
    assert job({"train": "t.txt"}).data.scoring("", spec.rewards) == spec.rewards


def test_one_file_is_one_source_without_a_name() -> None:
    (source,) = job({"train": "t.txt", "validation": "v.txt", "prompt_column": "text"}).data.each
    assert (source.name, source.path, source.validation, source.columns.prompt) == ("", "t.txt", "v.txt", "text")
    assert [setting for setting, _, _ in source.files("prompts")] == ["data.train", "data.validation"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "give data.train, or a \\[\\[data.sources\\]\\]"),
        ({"train": "t.txt", "sources": [SCENES]}, "data.train has no effect next to"),
        ({"validation": "t.txt", "sources": [SCENES]}, "data.validation has no effect next to"),
        ({"sources": [SCENES, SCENES]}, "two sources have the name 'scenes': rename"),
        ({"sources": [SCENES | {"weight": 0}]}, "no source has a weight at step 0"),
        ({"sources": [SCENES | {"curve": [[0, 1], [9, 0]]}]}, "no source has a weight at step 9"),
        ({"sources": [SCENES | {"curve": [[9, 1], [3, 0]]}]}, "ascending"),
        ({"sources": [SCENES | {"weight": -1}]}, "data.sources.0.weight"),
        ({"sources": [SCENES | {"name": "a b"}]}, "data.sources.0.name"),
        ({"train": "t.txt", "prompt_column": "images"}, "has another meaning"),
        (
            {"sources": [SCENES | {"prompt_column": "text"}]},
            "data.sources.0.prompt_column was removed: data.prompt_column",
        ),
        ({"sources": [SCENES | {"pth": "x"}]}, "data.sources.0.pth: unknown setting; did you mean data.sources.0.path"),
        ({"sources": [SCENES, SIGNS | {"rewards": {"orc": 1}}]}, "data.sources.1.rewards.orc: the job has no such"),
        ({"sources": [SCENES, SIGNS | {"rewards": {"ocr": 0}}]}, "data.sources.1.rewards has no weight"),
        ({"sources": [SIGNS]}, "rewards.aesthetic scores no source"),
    ],
)
def test_what_cannot_work_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(data)


def test_a_source_must_not_be_left_without_a_reward() -> None:
    rewards = {"ocr": {"on_failure": "skip"}, "aesthetic": {}}
    job({"train": "t.txt"}, rewards)
    with pytest.raises(ValueError, match=r'rewards.ocr.on_failure = "skip" leaves no reward'):
        job({"sources": [SIGNS, SCENES]}, rewards)


def test_sources_of_a_job_file_are_found_beside_it(tmp_path: Path) -> None:
    (tmp_path / "signs.txt").write_text("a sign\n")
    (tmp_path / "job.toml").write_text(
        'model.path = "/m"\nrewards.ocr = {}\n[[data.sources]]\nname = "signs"\npath = "signs.txt"\n'
        '[[data.sources]]\nname = "more"\npath = "https://host/more.txt"\n'
    )
    spec = prepare_job(tmp_path / "job.toml", same_machine=True)
    assert [source.path for source in spec.data.sources] == [str(tmp_path / "signs.txt"), "https://host/more.txt"]
    assert tmp_path in data_folders(spec)
