"""A job of several sources through the control plane: which rewards score its samples, and metrics of each source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flowfleet.proto import reward_pb2
from tests.services.controller.scripted import ScriptedFleet, ScriptedReward, scripted_fleet

STEPS = 4


def place_of(sample: reward_pb2.RewardSample) -> float:
    return int(sample.sample_id.rpartition("/")[2]) / 4


async def test_each_source_is_scored_by_its_own_rewards(redis_url: str, tmp_path: Path) -> None:
    for name in ("signs", "scenes"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {k}\n" for k in range(5)))
        (tmp_path / f"{name}-held.txt").write_text(f"{name} held 0\n{name} held 1\n{name} held 2\n")
    asked: dict[str, set[str]] = {"ocr": set(), "aesthetic": set()}

    def reward(name: str, score: Any) -> ScriptedReward:
        def scored(sample: reward_pb2.RewardSample) -> float:
            asked[name].add(sample.prompt.partition(" ")[0])
            return float(score(sample))

        return ScriptedReward(scored)

    settings = {
        "model": {"path": str(tmp_path / "m")},
        "data": {
            "sources": [
                {
                    "name": name,
                    "path": str(tmp_path / f"{name}.txt"),
                    "validation": str(tmp_path / f"{name}-held.txt"),
                    "rewards": rewards,
                    "weight": weight,
                }
                for name, rewards, weight in (("signs", {"ocr": 2.0}, 1), ("scenes", {"aesthetic": 1.0}, 3))
            ]
        },
        "rewards": {"ocr": {}, "aesthetic": {"weight": 0.1}},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "batch_size": 8},
        "schedule": {"steps": STEPS, "save_every": 2, "validate_every": 4},
        "algorithm": {"advantage_clamp": None},
    }

    async def check(fleet: ScriptedFleet, job_id: str) -> None:
        assert asked == {"ocr": {"signs"}, "aesthetic": {"scenes"}}
        samples, _ = await fleet.store.samples.page(job_id, limit=100)
        assert len(samples) == STEPS * 16
        for sample in samples:
            assert sample.prompt.startswith(sample.source)
            assert set(sample.scores) == ({"ocr"} if sample.source == "signs" else {"aesthetic"})
            assert sample.reward is not None
            level = 2 * sample.index / 4 if sample.source == "signs" else 0.1 * (20 + sample.index / 4)
            np.testing.assert_allclose(sample.reward, level)
        rows = {row.step: row.values for row in await fleet.store.history.metrics(job_id, None, 100)}
        for step in range(STEPS):
            assert rows[step]["critic/sources/signs/num_samples"] == 4, "a quarter of the groups"
            assert rows[step]["critic/sources/signs/reward_mean"] == 0.75
            assert rows[step]["critic/sources/scenes/rewards/aesthetic/mean"] == 20.375
            assert rows[step]["critic/rewards/ocr/missing"] == rows[step]["critic/rewards/aesthetic/missing"] == 0
        last = {name: value or 0.0 for name, value in rows[STEPS].items()}
        assert last["val-core/sources/signs/num_samples"] == last["val-core/sources/scenes/num_samples"] == 3
        np.testing.assert_allclose(last["val-core/sources/scenes/reward_mean"], 2.0)
        np.testing.assert_allclose(last["val/reward"], 1.0)
        for request in fleet.trainer.steps:  # of one group of signs and three of scenes, whose levels differ by 20
            own = np.array([0, 0.25, 0.5, 0.75])
            spread = np.sqrt((4 * np.var(2 * own) + 12 * np.var(0.1 * own)) / 16)
            found = sorted({round(s.advantage, 9) for s in request.samples})
            center = own - own.mean()
            expected = sorted(
                {*np.round(2 * center / (spread + 1e-4), 9), *np.round(0.1 * center / (spread + 1e-4), 9)}
            )
            np.testing.assert_allclose(found, expected, rtol=1e-6)

    rewards = {"ocr": reward("ocr", place_of), "aesthetic": reward("aesthetic", lambda s: 20 + place_of(s))}
    async with scripted_fleet(redis_url, tmp_path / "state", rewards) as fleet:
        await check(fleet, (await fleet.run(settings)).id)
