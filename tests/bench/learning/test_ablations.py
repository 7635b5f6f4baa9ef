"""The studies of settings on composition: their jobs, and the table of what they came to."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from PIL import Image

from bench.learning import ablations
from bench.learning.ablations import STUDIES, draw, draw_costs, plan, study_table
from bench.learning.composition import JUDGE, REWARDS
from bench.learning.jobs import SMOOTH
from bench.learning.results import Point, Result
from flowfleet.demo.demos import DEMOS
from flowfleet.demo.plots import Line as Drawn
from flowfleet.job.files import prepare_job
from flowfleet.job.spec import JobSpec

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def tried(directory: Path) -> None:
    """Flow-GRPO did best at twice its learning rate, the others at their own."""
    for name, reward in (
        *(("ocr-1-1", 0.5), ("ocr-2-1", 0.6), ("awm-1-1", 0.7)),
        *(("crd-1-1", 0.7), ("diffusion_nft_full-1-1", 0.7), ("ocr_full-1-1", 0.7), ("flow_cps-0.5-1", 0.7)),
        ("refl-2-1", 0.7),
    ):
        folder = directory / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_text(json.dumps({"held_out_reward_after": reward}))
        (folder / "metrics.jsonl").write_text("")


def jobs(study: str, directory: Path) -> dict[str, JobSpec]:
    tried(directory)
    return {
        run.directory.name: prepare_job(Path(f"recipes/{run.recipe}.toml"), run.changes, same_machine=True)
        for run in plan(study, [1], directory)
    }


@pytest.mark.parametrize("study", STUDIES)
def test_every_line_is_a_job_that_makes_as_many_pictures(study: str, tmp_path: Path) -> None:
    found = jobs(study, tmp_path)
    assert len(found) == len(STUDIES[study])
    pictures = {one.rollout.prompts_per_step * one.rollout.group_size for one in found.values()}
    assert pictures == {288 if study == "medium" else 144}
    rates = {(one.algorithm.name, one.trainer.optimizer.lr) for one in found.values()}
    ways = {("flow_grpo", 1e-4), ("flow_cps", 4.5e-4)}
    others = {
        "guidance": {("awm", 6e-4)},
        "gradient": {("refl", 2.4e-3)},
        "medium": {("flow_grpo", 5e-5), ("diffusion_nft", 1e-4), ("awm", 6e-4), ("crd", 6e-4)},
        "full": {("awm", 6e-4), ("crd", 6e-4), ("diffusion_nft", 1e-4)} | ways,
        "full_settings": {("flow_grpo", 2e-4)} | ways,
    }
    usual = set() if study in ("medium", "gradient") else {("flow_grpo", 1.2e-3)}
    assert rates == usual | others.get(study, set())


def test_lines_change_what_they_say(tmp_path: Path) -> None:
    stale = jobs("staleness", tmp_path)
    assert stale["at_most_4-corrected-1"].schedule.max_staleness == 4
    assert stale["at_most_4-corrected-1"].algorithm.correction.mode == "truncated"
    assert stale["at_most_4-1"].algorithm.correction.mode == "none"
    guards = jobs("guards", tmp_path)
    assert guards["reward_alone-1"].algorithm.kl_coef == 0.0
    assert guards["gate-1"].rewards["image_quality"].gate is not None
    assert guards["GARDO-1"].algorithm.kl_gate.rewards == ("image_quality",)

    pushed = jobs("gradient", tmp_path)
    ceilings = {name: one.algorithm.reward_ceiling for name, one in pushed.items() if one.algorithm.reward_ceiling}
    assert ceilings == {"ceiling_0.7-1": 0.7}
    assert [one.algorithm.kl_coef for one in pushed.values()] == [0, 0, 1, 10, 0, 0, 1]
    assert pushed["gate-1"].rewards["image_quality"].gate is not None
    assert pushed["second_reward-1"].rewards["image_quality"].weight == 0.5
    doubted = pushed["KL_1_where_doubted-1"].algorithm
    assert (doubted.kl_gate.rewards, doubted.kl_reference.every) == (("image_quality",), 3)

    assert [one.schedule.max_staleness for one in jobs("medium", tmp_path).values()] == [1, 0, 1, 1]
    medium = jobs("medium", tmp_path)["AWM-1"]
    assert (medium.model.dtype, medium.rollout.guidance_scale) == ("bfloat16", 3.0)
    assert Path(str(medium.data.validation)).name == "medium_seen.jsonl"
    assert {name: part.weight for name, part in medium.rewards.items() if part.weight} == {SMOOTH: 1.0}
    assert medium.trainer.optimizer.lr_schedule == "cosine"
    assert (medium.trainer.compile, medium.rollout.compile, medium.trainer.deterministic) == (True, True, False)
    assert Path(str(medium.data.train)).name == "medium_weighted.jsonl"

    full = jobs("full", tmp_path)["DiffusionNFT-full-1"]
    assert (full.rollout.height, full.trainer.mode) == (128, "full")
    assert Path(str(full.data.train)).name == "full_train.jsonl"

    for study, small, large in (("resolution", 64, 128), ("resolution_256", 128, 256)):
        sizes = {
            name: (
                (one.rollout.height, one.rollout.width),
                (one.schedule.validation_height, one.schedule.validation_width),
            )
            for name, one in jobs(study, tmp_path).items()
        }
        assert sizes == {
            f"{small}_pixels-1": ((small, small), (None, None)),
            f"{small}-judged_at_{large}-1": ((small, small), (large, large)),
            f"{large}_pixels-1": ((large, large), (None, None)),
        }

    guided = jobs("guidance", tmp_path)
    assert guided["AWM-guidance_3-1"].rollout.guidance_scale == 3.0
    assert guided["AWM-guidance_3-1"].algorithm.name == "awm"
    assert [one.rollout.group_size for one in jobs("group", tmp_path).values()] == [4, 6, 12, 24]
    assert [one.rollout.window.size for one in jobs("window", tmp_path).values()] == [1, 2, 4, 6, 2]


def test_what_a_line_changes_outlasts_what_is_given_to_all(tmp_path: Path) -> None:
    tried(tmp_path)
    run = plan("staleness", [1], tmp_path, ["trainer.micro_batch_size=144", "schedule.steps=7"])[0]
    job = prepare_job(Path(f"recipes/{run.recipe}.toml"), run.changes, same_machine=True)
    assert (job.trainer.micro_batch_size, job.schedule.steps) == (36, 7)


def test_runs_name_the_rewards_that_they_share(tmp_path: Path) -> None:
    tried(tmp_path)
    shared = DEMOS["composition"].rewards
    for study in STUDIES:
        wanted = REWARDS if study in ("gradient", "medium") else shared
        assert {run.rewards for run in plan(study, [1], tmp_path)} == {wanted}


def test_studies_want_a_learning_rate(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="composition train --algorithms ocr"):
        plan("group", [1], tmp_path)


def test_lines_may_be_chosen(tmp_path: Path) -> None:
    tried(tmp_path)
    chosen = plan("full", [1, 2], tmp_path, titles=["AWM"])
    assert [run.directory.name for run in chosen] == ["AWM-1", "AWM-2"]


def test_seeds_come_whole(tmp_path: Path) -> None:
    tried(tmp_path)
    assert [run.seed for run in plan("group", [1, 2], tmp_path)] == [1] * 4 + [2] * 4


def result(before: float, after: float, least: float, seconds: float, staleness: float) -> Result:
    summary = {
        "held_out_reward_after": 0.7,
        "training_seconds": seconds,
        "watched": {JUDGE: {"before": before, "after": after, "bootstrap_ci95": [least, 0.9]}},
        **dict.fromkeys(("edge_density_before", "edge_density_after"), 8.0),
        **dict.fromkeys(("colour_entropy_before", "colour_entropy_after"), 2.0),
    }
    return Result(summary, (), staleness)


def test_the_table_pairs_before_and_after() -> None:
    """Gains are of a seed each: +0.1 and +0.4, not those of other pairings."""
    runs = [result(0.4, 0.5, 0.02, 100.0, 1.0), result(0.2, 0.6, 0.3, 140.0, 1.5)]
    (row,) = study_table({STUDIES["group"][2]: runs}).splitlines()[2:]
    assert row == (
        "| 12 × 12 | 2 | 0.300 (0.200 … 0.400) | 0.550 (0.500 … 0.600) | +0.250 (+0.100 … +0.400) | ≥ +0.020 "
        "| 0.700 (0.700 … 0.700) | 1.25 | 120 | +0.0 % | +0.0 % |"
    )


def test_the_curves_are_a_picture(tmp_path: Path) -> None:
    draw({STUDIES["group"][2]: [result(0.4, 0.5, 0.02, 100.0, 1.0)]}, tmp_path / "curves.png", "group")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width > picture.height > 0


def test_costs_are_pictures_steps_and_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = dict[str, list[tuple[list[int], list[float]]]]()

    def record(path: Path, panels: Mapping[str, Sequence[Drawn]], *about: str) -> None:
        drawn.update(
            {
                name: [(list(one.curve.samples), list(one.curve.rewards)) for one in ones]
                for name, ones in panels.items()
            }
        )

    monkeypatch.setattr(ablations, "measure_panels", record)
    settings = {"rollout": {"prompts_per_step": 12, "group_size": 24}}
    points = [Point(0, 0.0, 0.5), Point(1440, 20.0, 0.7), Point(2880, 40.0, 0.75)]
    run = Result({"settings": settings, "training_seconds": 30.0}, points)
    draw_costs({STUDIES["medium"][0]: [run]}, tmp_path / "costs.png", "medium")
    assert list(drawn.values()) == [[([0, last // 2, last], [0.5, 0.7, 0.75])] for last in (2880, 10, 30)]
