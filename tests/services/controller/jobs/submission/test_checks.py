"""Whatever JSON comes as a job, it is a job or an InvalidJob whose every message names a setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from flowfleet.job.spec import JobSpec
from services.controller.jobs.submission.checks import check, parse
from services.controller.jobs.submission.problems import InvalidJob
from services.controller.limits import Limits
from services.controller.platforms.local.directory import StaticDirectory
from services.controller.prompts.sources import Sources
from services.controller.reading.places import Places

DEFAULT: dict[str, Any] = JobSpec.model_validate(
    {"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}}
).model_dump(mode="json")
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


def places(value: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every setting of a job, parts too."""
    if not isinstance(value, dict):
        return [prefix]
    return [prefix, *(place for name, item in value.items() for place in places(item, (*prefix, name)))]


def outcome(job: dict[str, Any]) -> tuple[JobSpec | None, list[str]]:
    try:
        return parse(job), []
    except InvalidJob as error:
        return None, list(error.problems)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(places(DEFAULT)[1:]), st.text(max_size=5), VALUES)
def test_any_value_anywhere(place: tuple[str, ...], added: str, value: Any) -> None:
    job = json.loads(json.dumps(DEFAULT))
    part = job
    for name in place[:-1]:
        part = part[name]
    part[place[-1] + added] = value
    spec, problems = outcome(job)
    assert (spec is None) == bool(problems)
    assert all(problem.strip() for problem in problems)
    if spec is not None:
        assert parse(spec.model_dump(mode="json")) == spec


async def test_a_trainer_of_more_ranks_than_accelerators_is_refused_at_submit() -> None:
    spec = parse({**DEFAULT, "trainer": {"world_size": 3}})
    with pytest.raises(InvalidJob) as refused:
        await check(spec, StaticDirectory({"ocr": "x:1"}), Sources(Places()), Limits(), ("0", "1"))
    message = "trainer.world_size = 3: trainers have 2 accelerators here (0, 1), one a rank; set it to at most 2"
    assert any(problem.startswith(message) for problem in refused.value.problems)


@pytest.mark.parametrize("name", ["none", "x" * 5000])
async def test_an_adapter_that_is_not_there_is_refused_at_submit(name: str, tmp_path: Path) -> None:
    sources = Sources(Places.of([tmp_path], [], tmp_path / "state"))

    async def problems() -> list[str]:
        spec = parse({**DEFAULT, "model": {"path": "m", "adapter": str(tmp_path / name)}})
        with pytest.raises(InvalidJob) as refused:
            await check(spec, StaticDirectory({"ocr": "x:1"}), sources, Limits())
        return [problem for problem in refused.value.problems if problem.startswith("model.adapter: ")]

    assert len(await problems()) == 1
    if len(name) < 255:
        (tmp_path / name).mkdir()
        assert "holds no adapter: give a folder with pytorch_lora_weights.safetensors" in (await problems())[0]
        file = tmp_path / name / "adapter_model.safetensors"
        file.touch()
        (file.parent / "adapter_config.json").write_text('{"r": 2}')
        assert "is not a whole file of safetensors" in (await problems())[0]
        save_file({"base_model.model.to_q.lora_A.weight": np.zeros((2, 2))}, file)
        assert await problems() == []
        (file.parent / "adapter_config.json").write_text('{"r": 2, "use_dora": true}')
        assert "has use_dora = true, so it is not base + B·A: merge it" in (await problems())[0]


@pytest.mark.parametrize(
    ("job", "problem"),
    [
        (
            {"rewards": {"orc": {}}},
            "rewards.orc: this controller has no such reward service; it has: jpeg, ocr; add one by `flowfleet up ",
        ),
        ({"rollout": {"pool": "h200"}}, "rollout.pool = 'h200': this fleet has no such pool; it has: a, b"),
    ],
)
async def test_a_name_that_the_fleet_does_not_know_is_refused_at_submit(job: dict[str, Any], problem: str) -> None:
    directory = StaticDirectory({"ocr": "x:1", "jpeg": "x:2"})
    directory.pools = {"b", "a"}
    with pytest.raises(InvalidJob) as refused:
        await check(parse({**DEFAULT, **job}), directory, Sources(Places()), Limits())
    assert any(found.startswith(problem) for found in refused.value.problems)


@pytest.mark.parametrize(
    ("room", "parts"),
    [
        (40, {"schedule": {"save_every": 100}}),  # trajectories of 201 steps
        (40, {"schedule": {"save_every": 1, "keep_pictures": 10_000}}),
        (40, {"schedule": {"save_every": 1, "validation_samples": 64}}),
        (0, {"schedule": {"save_every": 100}}),
        (40, {}),
    ],
)
async def test_a_job_whose_samples_do_not_fit_redis_is_refused_at_submit(
    tiny_qwen_image: Path, tmp_path: Path, room: int, parts: dict[str, Any]
) -> None:
    (tmp_path / "p.txt").write_text("a\nb\n")
    data = {"train": str(tmp_path / "p.txt"), "validation": str(tmp_path / "p.txt")}
    rollout = {"height": 512, "width": 512, "prompts_per_step": 1, "group_size": 2, "batch_size": 2}
    schedule = {"steps": 10_000, "save_every": 1, "keep_last": 1, "keep_pictures": 0, **parts.get("schedule", {})}
    job = {**DEFAULT, "model": {"path": str(tiny_qwen_image)}, "data": data, "rollout": rollout, "schedule": schedule}
    spec, problems = parse(job), list[str]()
    sources = Sources(Places.of([tmp_path, tiny_qwen_image], [], tmp_path / "state"))
    try:
        await check(spec, StaticDirectory({"ocr": "x:1"}), sources, Limits(), room=room * 2**20)
    except InvalidJob as error:
        problems = [problem for problem in error.problems if "GiB in Redis" in problem]
    assert len(problems) == bool(room and parts)
