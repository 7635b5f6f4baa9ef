"""Whole jobs through the control plane, on a fleet without models: what rollouts, rewards and trainer are asked for
depends on the algorithm, and every sample is accounted for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowfleet.algorithms.advantages import group_advantages
from flowfleet.algorithms.registry import ALGORITHMS, LOSSES
from flowfleet.api.jobs import Desired, JobStatus
from flowfleet.job.spec import parse_job
from flowfleet.process.telemetry import LOG_PROB_GAP, LOG_PROB_NOT_FINITE
from flowfleet.proto import common_pb2, reward_pb2, trainer_pb2
from services.controller.fleet import watch as fleet_watch
from services.controller.job.driver import TICK_S
from services.controller.job.trainer import hangs, watch
from services.controller.rewards import scoring
from services.controller.store.records import Action
from tests.e2e.matrix.choice import least_settings
from tests.services.controller.scripted import ScriptedFleet, ScriptedReward, ScriptedTrainer, scripted_fleet
from tests.waiting import until

Job = Callable[..., dict[str, Any]]
Run = Callable[..., AbstractAsyncContextManager[ScriptedFleet]]


@pytest.fixture
def run(redis_url: str, tmp_path: Path) -> Run:
    """Starts a fleet with these rewards."""
    return lambda **rewards: scripted_fleet(redis_url, tmp_path / "state", rewards)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Two steps of two prompts × four samples; whole parts can be replaced."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\nc\n")
    base: dict[str, Any] = {
        "model": {"path": str(tmp_path / "m")},
        "data": {"train": str(prompts)},
        "rollout": {"prompts_per_step": 2, "group_size": 4, "batch_size": 8},
        "schedule": {"steps": 2, "save_every": 1, "validate_every": 2, "keep_last": 1},
    }
    return lambda **parts: {name: {**base.get(name, {}), **part} for name, part in {**base, **parts}.items()}


def by_index(sample: reward_pb2.RewardSample) -> float:
    """0.0, 0.25, 0.5, … by the sample's index."""
    return int(sample.sample_id.rpartition("/")[2]) / 4


def same_in_step_0(sample: reward_pb2.RewardSample) -> float:
    _, step, _, index = sample.sample_id.split("/")
    return 0.5 if step == "0" else int(index) / 4


def places(request: trainer_pb2.TrainStepRequest) -> list[tuple[int, int, int, float]]:
    """(group, index, pair, advantage) of each sample."""
    return [(s.sample.id.group, s.sample.id.index, s.pair, s.advantage) for s in request.samples]


async def test_policy_losses_get_steps_and_normalized_advantages(run: Run, job: Job) -> None:
    """Each reward's advantages are normalized before the sum: the large one does not drown the small one."""
    settings = job(
        algorithm={"reward_combination": "normalized", "advantage_clamp": None},
        rewards={"small": {"weight": 1.0}, "large": {"weight": 2.0}},
        rollout={"prompts_per_step": 2, "group_size": 4, "window": {"strategy": "progressive", "shift_every": 2}},
    )
    async with run(
        small=ScriptedReward(by_index), large=ScriptedReward(lambda sample: -1000 * by_index(sample))
    ) as fleet:
        record = await fleet.run(settings)
        assert record.results["samples_trained"] == 16
        assert record.results["samples_dropped"] == {}
        assert {request.record for request in fleet.rollout.requests} == {common_pb2.RECORD_STEPS}
        assert {tuple(request.noise.sde_steps) for request in fleet.rollout.requests} == {(0, 1)}  # shifts at step 2
        small = np.array([0.0, 0.25, 0.5, 0.75])
        own, _ = group_advantages(small, [0] * 4, std="group", clamp=None)
        total = own + 2 * group_advantages(-1000 * small, [0] * 4, std="group", clamp=None)[0]
        expected = np.tile(total / (total.std() + 1e-4), 2)
        for request in fleet.trainer.steps:
            assert [place[:2] for place in places(request)] == [(g, i) for g in range(2) for i in range(4)]
            np.testing.assert_allclose([s.advantage for s in request.samples], expected, rtol=1e-9)


async def test_an_average_is_validated_and_never_sampled_with(run: Run, job: Job, tmp_path: Path) -> None:
    """The replica refuses a request for other weights than it was given; so does the test's."""
    held_out = tmp_path / "held-out.txt"
    held_out.write_text("d\ne\n")
    settings = job(algorithm={"name": "diffusion_nft"}, rewards={"ocr": {}}, data={"validation": str(held_out)})
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        record = await fleet.run(settings)
        assert record.results["held_out_reward"] is not None
        for request in fleet.rollout.requests:
            assert request.evaluated == (request.purpose == common_pb2.PURPOSE_VALIDATE)
        assert dict.fromkeys(fleet.trainer.published) == dict.fromkeys([(0, True), (0, False), (1, False), (2, True)])


async def test_a_job_of_no_steps_only_validates(run: Run, job: Job, tmp_path: Path) -> None:
    """Training data are not read, groups are whole, so a reward of groups scores them, and nothing is trained."""
    held_out = tmp_path / "held-out.txt"
    held_out.write_text("d\ne\nf\n")
    settings = job(
        data={"train": str(tmp_path / "missing.txt"), "validation": str(held_out)},
        rewards={"ocr": {}, "whole": {}},
        schedule={"steps": 0, "validation_samples": 4},
    )
    async with run(ocr=ScriptedReward(by_index), whole=ScriptedReward(by_index, needs_group=True)) as fleet:
        record = await fleet.run(settings)
        assert (record.results["samples_trained"], record.results["model"]) == (0, None)
        assert record.results["held_out_reward"] == 2 * (0.0 + 0.25 + 0.5 + 0.75) / 4
        assert (fleet.trainer.steps, fleet.trainer.saves, fleet.trainer.exports) == ([], [], [])
        sizes = [[len(group.indices) for group in request.groups] for request in fleet.rollout.requests]
        assert sorted(sizes) == [[4], [4, 4]]
        samples, _ = await fleet.store.samples.page(record.id, purpose="validate", limit=50)
        assert {(sample.group, sample.index) for sample in samples} == {(g, i) for g in range(3) for i in range(4)}
        assert len({sample.seed for sample in samples}) == 12
        assert {sample.prompt for sample in samples if sample.group == 2} == {"f"}
        (row,) = [row.values for row in await fleet.store.history.metrics(record.id)]
        assert (row["val/num_prompts"], row["val/num_scored"]) == (3.0, 12.0)
        again = await fleet.run(settings)
        repeated, _ = await fleet.store.samples.page(again.id, purpose="validate", limit=50)
        assert [sample.seed for sample in repeated] == [sample.seed for sample in samples]


SAMPLING_FLOWS = [
    name for name, known in ALGORITHMS.items() if known.data == "prompts" and LOSSES[known.loss].kind != "sequence"
]


@pytest.mark.parametrize("name", SAMPLING_FLOWS)
async def test_every_algorithm_runs_to_its_end(run: Run, job: Job, tmp_path: Path, name: str) -> None:
    """What is recorded goes with the loss, steps are named where noise enters or a loss begins, and all samples are
    accounted for."""
    algorithm = {"name": name, **least_settings(ALGORITHMS[name], str(tmp_path / "teacher"))}
    settings = job(algorithm=algorithm, rewards={"ocr": {}}, schedule={"steps": 2, "max_staleness": 1})
    spec = parse_job(settings)
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        record = await fleet.run(settings)
        kept = common_pb2.RECORD_STEPS if spec.records_steps else common_pb2.RECORD_FINAL
        for request in fleet.rollout.requests:
            assert request.record == kept
            assert request.noise.eta == pytest.approx(spec.rollout.noise.eta)
            assert bool(request.noise.sde_steps) == (spec.rollout.noise.eta > 0 or spec.loss.from_steps)
        trained = sum(len(request.samples) for request in fleet.trainer.steps)
        assert trained == (8 if spec.loss.needs_pairs else 16)
        assert record.results["samples_trained"] == trained
        assert sum(record.results["samples_dropped"].values()) == 16 - trained


async def test_online_pairs_are_best_and_worst_and_a_step_without_goes_on(run: Run, job: Job) -> None:
    settings = job(algorithm={"name": "online_dpo"}, rewards={"ocr": {}})
    async with run(ocr=ScriptedReward(same_in_step_0)) as fleet:
        record = await fleet.run(settings)
        first, second = fleet.trainer.steps
        assert places(first) == []
        assert places(second) == [(0, 3, 0, 1.0), (0, 0, 0, -1.0), (1, 3, 0, 1.0), (1, 0, 0, -1.0)]
        assert [sample.reward for sample in second.samples] == [0.75, 0.0, 0.75, 0.0]
        assert {request.record for request in fleet.rollout.requests} == {common_pb2.RECORD_FINAL}
        assert all(not request.noise.sde_steps for request in fleet.rollout.requests)
        assert record.results["samples_trained"] == 4
        assert record.results["samples_dropped"] == {"not_in_a_pair": 12}
        rows = [row.values for row in await fleet.store.history.metrics(record.id)]
        assert [(row["training/samples"], row["training/samples_dropped"]) for row in rows] == [(0, 8), (4, 12)]
        assert [row["critic/advantages/max"] for row in rows] == [0, 1]
        assert [row["critic/rewards/zero_std_ratio"] for row in rows] == [1, 0]
        assert record.progress.samples_dropped == {"not_in_a_pair": 12}


async def test_given_preferences_are_encoded_never_scored(run: Run, job: Job, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    lines = [{"prompt": name, "chosen": f"{name}+.png", "rejected": f"{name}-.png"} for name in "ab"]
    pairs.write_text("\n".join(map(json.dumps, lines)))
    for line in lines:
        for which in ("chosen", "rejected"):
            (tmp_path / line[which]).write_bytes(line[which].encode())
    settings = job(
        algorithm={"name": "dpo"},
        data={"train": str(pairs), "validation": str(tmp_path / "prompts.txt")},
        rollout={"prompts_per_step": 2, "group_size": 2, "batch_size": 8},
        rewards={"ocr": {}},
    )
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        record = await fleet.run(settings)
        for request in fleet.trainer.steps:
            assert places(request) == [(0, 0, 0, 1.0), (0, 1, 0, -1.0), (1, 0, 0, 1.0), (1, 1, 0, -1.0)]
        training = [r for r in fleet.rollout.requests if r.purpose == common_pb2.PURPOSE_TRAIN]
        assert {request.record for request in training} == {common_pb2.RECORD_FINAL}
        assert {medium.media_type for r in training for g in r.groups for medium in g.media} == {"image/png"}
        stored = await fleet.blob_keys(record.id, "given")
        assert len(stored) == 4
        assert all([await fleet.redis.ttl(key) > 0 for key in stored])
        shown, _ = await fleet.store.samples.page(record.id, limit=20)
        assert len(shown) == 8
        for sample in shown:
            assert sample.scores == {"preference": 1.0 - sample.index}
            ref = common_pb2.BlobRef(uri=sample.media_uri, size_bytes=sample.media_size_bytes)
            ref.sha256 = sample.media_sha256
            assert await fleet.blobs.get(ref) == f"{sample.prompt}{'+-'[sample.index]}.png".encode()
        assert sum(fleet.rewards["ocr"].sizes) == 2 * 3  # the validations before and after
        assert record.progress.held_out_reward == 0.0


async def test_condition_images_go_along_and_are_stored_once(run: Run, job: Job, tmp_path: Path) -> None:
    prompts = tmp_path / "edits.jsonl"
    lines = [{"prompt": f"edit {k}", "images": ["same.png", f"{k}.webp"]} for k in range(2)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    for name in ("same.png", "0.webp", "1.webp"):
        (tmp_path / name).write_bytes(name.encode())
    settings = job(data={"train": str(prompts), "validation": str(prompts)}, rewards={"ocr": {}})
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        record = await fleet.run(settings)
        assert len(fleet.rollout.images) == 2 * 2 + 2 * 2  # two steps, two validations
        for request in fleet.rollout.requests:
            for group in request.groups:
                assert [image.media_type for image in group.images] == ["image/png", "image/webp"]
        assert sorted(set(map(tuple, fleet.rollout.images))) == [(b"same.png", b"0.webp"), (b"same.png", b"1.webp")]
        stored = {image.blob.uri for r in fleet.rollout.requests for g in r.groups for image in g.images}
        assert len(stored) == 3
        async with asyncio.timeout(10):  # the status is published first
            for kind in ("condition", "trajectory", "negative_embeds"):
                while await fleet.blob_keys(record.id, kind):
                    await asyncio.sleep(0.02)


async def test_a_preference_whose_file_is_gone_costs_its_own_group(
    run: Run, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.controller.job.recovery.retries.MAX_FAILURES", 2)
    pairs = tmp_path / "pairs.jsonl"
    lines = [{"prompt": name, "chosen": f"{name}+.png", "rejected": f"{name}-.png"} for name in "abc"]
    pairs.write_text("\n".join(map(json.dumps, lines)))
    for name in ("a+.png", "a-.png", "b+.png", "c+.png", "c-.png"):
        (tmp_path / name).write_bytes(name.encode())
    settings = job(
        algorithm={"name": "dpo"},
        data={"train": str(pairs)},
        rollout={"prompts_per_step": 3, "group_size": 2, "batch_size": 6},
    )
    async with run() as fleet:
        record = await fleet.run(settings)
        assert [len(request.samples) for request in fleet.trainer.steps] == [4, 4]
        assert record.results["samples_trained"] == 8
        assert record.results["samples_dropped"] == {"rollout_failed": 4}
        assert {sample.prompt for sample in (await fleet.store.samples.page(record.id, limit=20))[0]} == {"a", "c"}
        reasons = [
            event.data["reason"] for event in await fleet.store.events.read(record.id) if event.type == "gave_up"
        ]
        assert len(reasons) == 2
        assert all("b-.png, which does not exist" in reason for reason in reasons)


async def test_a_sample_whose_blob_is_lost_is_made_again_and_nothing_is_dropped(
    run: Run, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gone before it was scored, gone before it was trained, and not what was written; each once."""
    to_lose = {("media", 0, 0, 1), ("trajectory", 0, 1, 2), ("prompt_embeds", 1, 0, 3), ("negative_embeds", 1, 1, 0)}
    to_flip = {("trajectory", 1, 0, 0), ("media", 1, 1, 2)}
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        put = fleet.rollout._put

        async def losing(request: Any, kind: str, group: Any, index: int, data: bytes) -> common_pb2.BlobRef:
            ref = await put(request, kind, group, index, data)
            place, key = (kind, request.step, group.group, index), ref.uri.removeprefix("redis:")
            if place in to_lose:
                to_lose.remove(place)
                await fleet.redis.delete(key)
            if place in to_flip:
                to_flip.remove(place)
                await fleet.redis.set(key, bytes([data[0] ^ 1]) + data[1:])
            return ref

        monkeypatch.setattr(fleet.rollout, "_put", losing)
        fleet.trainer.reads = True
        record = await fleet.run(job(rewards={"ocr": {}}))
        assert not to_lose
        assert not to_flip
        assert [len(request.samples) for request in fleet.trainer.steps] == [8, 8]
        assert record.results["samples_trained"] == 16
        assert record.results["samples_dropped"] == {}
        assert record.results["duplicates"] == 0
        asked = [(r.step, g.group, i) for r in fleet.rollout.requests for g in r.groups for i in g.indices]
        again = {place for place in asked if asked.count(place) > 1}
        assert again == {(0, 0, 1), (0, 1, 2), (1, 0, 3), (1, 1, 0), (1, 0, 0), (1, 1, 2)}
        assert sum(fleet.rewards["ocr"].sizes) == 16  # what has a score keeps it
        lost = [
            name for e in await fleet.store.events.read(record.id) if e.type == "lost" for name in e.data["samples"]
        ]
        assert sorted(lost) == sorted("/".join(map(str, place)) for place in again)


async def test_a_broken_condition_image_costs_its_own_group_and_its_refills(
    run: Run, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.controller.job.recovery.retries.MAX_FAILURES", 2)
    prompts = tmp_path / "edits.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": name, "images": [f"{name}.png"]}) for name in ("good", "bad")))
    for name in ("good", "bad"):
        (tmp_path / f"{name}.png").write_bytes(name.encode())
    rollout = {"prompts_per_step": 2, "group_size": 4, "batch_size": 8, "max_refills": 3}
    settings = job(data={"train": str(prompts)}, rewards={"ocr": {}}, rollout=rollout)
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        fleet.rollout.broken = b"bad"
        record = await fleet.run(settings)
        assert [len(request.samples) for request in fleet.trainer.steps] == [4, 4]
        assert record.results["samples_trained"] == 8
        assert record.results["samples_dropped"] == {"rollout_failed": 2 * (4 + 3)}


@pytest.mark.parametrize(
    ("parts", "training", "validation"),
    [
        (
            {"rollout": {"tail_steps": 3}, "schedule": {"validation_sampler": "dpm_solver_2"}},
            ("", 3),
            ("dpm_solver_2", 0),
        ),
        (
            {"rollout": {"sampler": "dpm_solver_2"}, "algorithm": {"name": "diffusion_nft"}},
            ("dpm_solver_2", 0),
            ("dpm_solver_2", 0),
        ),
    ],
)
async def test_a_tail_is_for_training_and_a_sampler_for_validation_too(
    run: Run,
    job: Job,
    tmp_path: Path,
    parts: dict[str, Any],
    training: tuple[str, int],
    validation: tuple[str, int],
) -> None:
    settings = job(**parts, data={"validation": str(tmp_path / "prompts.txt")}, rewards={"ocr": {}})
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        await fleet.run(settings)
        asked: dict[bool, set[tuple[str, int]]] = {True: set(), False: set()}
        for request in fleet.rollout.requests:
            is_training = request.purpose == common_pb2.PURPOSE_TRAIN
            asked[is_training].add((request.sampling.sampler, request.noise.tail_steps))
        assert asked == {True: {training}, False: {validation}}


async def test_each_step_and_each_validation_is_told_once(run: Run, job: Job, tmp_path: Path) -> None:
    """An event has the distribution of rewards and advantages, and metrics.jsonl a line."""
    settings = job(data={"validation": str(tmp_path / "prompts.txt")}, rewards={"ocr": {}})
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        record = await fleet.run(settings)
        told = [event.data for event in await fleet.store.events.read(record.id, limit=1000) if event.type == "trained"]
        assert [data["step"] for data in told] == [0, 1]
        for data in told:
            assert (data["rewards"]["low"], data["rewards"]["high"]) == (0.0, 0.75), "the scores of four samples"
            assert sum(data["rewards"]["counts"]) == sum(data["advantages"]["counts"]) == 8
        file = tmp_path / "state/jobs" / record.id / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["step"] for line in lines if "step" in line] == [0, 1]
        assert [line["version"] for line in lines if "version" in line] == [0, 2]
        rows = {row.step: row.values for row in await fleet.store.history.metrics(record.id)}
        for line in lines:
            number = line.get("step", line.get("version"))
            figures = {name: value for name, value in line.items() if name not in ("step", "version", "time")}
            assert figures.items() <= rows[number].items()


async def test_gradients_that_a_trainer_kept_go_with_the_job(
    run: Run, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keeping(self: ScriptedTrainer, request: Any, context: Any) -> Any:
        folder = tmp_path / "state/jobs" / request.job_id / "checkpoints/gradients" / f"step-{request.step}-abc"
        folder.mkdir(parents=True)
        (folder / "0-0-0.safetensors").write_bytes(b"gradient")
        return await plain(self, request, context)

    plain = ScriptedTrainer.TrainStep
    monkeypatch.setattr(ScriptedTrainer, "TrainStep", keeping)
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        record = await fleet.run(job(rewards={"ocr": {}}, algorithm={"name": "srpo"}))
        checkpoints = tmp_path / "state/jobs" / record.id / "checkpoints"
        assert checkpoints.is_dir()
        await until(lambda: not (checkpoints / "gradients").exists())


async def test_videos_go_to_rewards_that_score_videos(run: Run, job: Job, tmp_path: Path) -> None:
    size = {"prompts_per_step": 2, "group_size": 4, "num_frames": 9, "embedded_guidance": 3.0, "condition_pixels": 512}
    good = job(rollout=size, rewards={"motion": {}}, data={"validation": str(tmp_path / "prompts.txt")})
    bad = job(rollout=size, rewards={"ocr": {}})
    video = ScriptedReward(by_index, modalities=[reward_pb2.MODALITY_VIDEO], needs_group=True, max_batch_size=4)
    async with run(motion=video, ocr=ScriptedReward(by_index, modalities=[reward_pb2.MODALITY_IMAGE])) as fleet:
        record = await fleet.run(good)
        sampling = [request.sampling for request in fleet.rollout.requests]
        assert {(s.num_frames, s.embedded_guidance, s.condition_pixels) for s in sampling} == {(9, 3.0, 512)}
        assert {sample.media_type for sample in (await fleet.store.samples.page(record.id))[0]} == {"video/mp4"}
        before, after = [e.data for e in await fleet.store.events.read(record.id) if e.type == "validation"]
        assert (before["val/num_prompts"], before["val/num_scored"]) == (3, 0)  # it scores whole groups
        (told,) = [e.data for e in await fleet.store.events.read(record.id) if e.type == "not_validated"]
        assert told["reward"] == "motion"
        assert before["val/edge_density"] == after["val/edge_density"] > 50  # noise
        assert fleet.rewards["motion"].sizes == [4] * 2 * 2
        fleet.trainer.steps.clear()
        record = await fleet.submit(bad)
        record = await fleet.reached(record.id, lambda record: record.status is JobStatus.PAUSED)
        assert "rewards.ocr does not score videos" in record.reason


async def test_what_is_refused_again_and_again_is_told_while_it_is_tried(
    run: Run, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.controller.job.driver.MAX_FAILURES", 2)
    settings = job(rewards={"ocr": {}})
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        fleet.rollout.refuses = True
        record = await fleet.submit(settings)
        record = await fleet.reached(record.id, lambda record: record.reason != "")
        assert record.status is JobStatus.RUNNING
        assert record.reason == "Generate is tried again: the text encoder is missing"
        fleet.rollout.refuses = False
        record = await fleet.ended(record.id)
        assert (record.status, record.reason) == (JobStatus.SUCCEEDED, "")


async def test_a_pool_that_loses_all_replicas_in_mid_step_is_the_jobs_reason(
    run: Run, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_watch, "EMPTY_S", 0.5)
    settings = job(rewards={"ocr": {}})
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        fleet.rollout.refuses = True
        record = await fleet.submit(settings)
        await fleet.reached(record.id, lambda _: fleet.rollout.version == 0)
        fleet.rollout.drains = True
        await fleet.rollout.announce()
        record = await fleet.reached(record.id, lambda record: "replica" in record.reason)
        assert record.status is JobStatus.RUNNING
        assert record.reason == "Generate is tried again: pool 'default' has no live rollout replica"
        fleet.rollout.refuses = fleet.rollout.drains = False
        record = await fleet.ended(record.id)
        assert (record.status, record.reason) == (JobStatus.SUCCEEDED, "")


@pytest.mark.parametrize("action", ["resume", "cancel"])
async def test_a_gap_above_the_limit_pauses_the_job_until_its_user_has_decided(
    run: Run, job: Job, action: Action
) -> None:
    rollout = {"prompts_per_step": 2, "group_size": 4, "max_log_prob_gap": 1e-4}
    settings = job(rewards={"ocr": {}}, rollout=rollout)
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        fleet.trainer.metrics = {0: {LOG_PROB_GAP: 3e-4}, 1: {LOG_PROB_GAP: 5e-5}}
        record = await fleet.submit(settings)
        record = await fleet.reached(record.id, lambda record: record.status is JobStatus.PAUSED)
        assert record.desired is Desired.PAUSED
        assert "3.00e-04, above rollout.max_log_prob_gap = 1.00e-04" in record.reason
        await asyncio.sleep(3 * TICK_S)  # nothing resumes it by itself
        assert (await fleet.store.jobs.get(record.id)).status is JobStatus.PAUSED
        assert len(fleet.trainer.steps) == 1
        await fleet.store.jobs.request(record.id, action)
        record = await fleet.ended(record.id)
        assert (record.status, record.reason) == (
            (JobStatus.SUCCEEDED, "") if action == "resume" else (JobStatus.CANCELLED, "")
        )
        assert len(fleet.trainer.steps) == (2 if action == "resume" else 1)
        rows = {row.step: row.values for row in await fleet.store.history.metrics(record.id)}
        assert rows[0][LOG_PROB_GAP] == 3e-4


async def test_a_gap_that_is_not_finite_pauses_the_job(run: Run, job: Job) -> None:
    rollout = {"prompts_per_step": 2, "group_size": 4, "max_log_prob_gap": 1e-4}
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        fleet.trainer.metrics = {0: {LOG_PROB_NOT_FINITE: 1.0}}  # of no row is there a gap
        record = await fleet.submit(job(rewards={"ocr": {}}, rollout=rollout))
        record = await fleet.reached(record.id, lambda record: record.status is JobStatus.PAUSED)
        assert record.reason.startswith("step 0: no log-prob of any row is finite, so the job learns nothing")
        assert len(fleet.trainer.steps) == 1


async def test_a_deterministic_job_pauses_while_several_devices_share_its_samples(run: Run, job: Job) -> None:
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        fleet.rollout.num_devices = 4
        await fleet.rollout.announce()
        await fleet.runner._fleet.refresh()
        record = await fleet.submit(job(rewards={"ocr": {}}, trainer={"deterministic": True}))
        record = await fleet.reached(record.id, lambda record: record.status is JobStatus.PAUSED)
        assert "4 devices of replica r0 share each sample" in record.reason
        fleet.rollout.num_devices = 1
        await fleet.rollout.announce()
        await fleet.runner._fleet.refresh()
        await fleet.store.jobs.request(record.id, "resume")
        record = await fleet.ended(record.id)
        assert (record.status, record.reason) == (JobStatus.SUCCEEDED, "")


@pytest.mark.parametrize("hacks", [True, False])
async def test_a_job_pauses_when_what_it_watches_falls_and_its_reward_does_not(
    run: Run, job: Job, tmp_path: Path, hacks: bool
) -> None:
    settings = job(
        data={"validation": str(tmp_path / "prompts.txt")},
        rewards={"ocr": {}, "people": {"weight": 0.0}},
        schedule={"steps": 3, "save_every": 1, "validate_every": 1, "max_disagreement": 0.5},
    )
    trained: list[trainer_pb2.TrainStepRequest] = []

    def liked(sample: reward_pb2.RewardSample) -> float:
        group = int(sample.sample_id.split("/")[2])
        return (0.9 - 0.5 * len(trained) if hacks else 0.1 + 0.1 * len(trained)) + 0.1 * (group % 2)

    async with run(ocr=ScriptedReward(by_index), people=ScriptedReward(liked)) as fleet:
        trained = fleet.trainer.steps
        record = await fleet.submit(settings)
        if hacks:
            record = await fleet.reached(record.id, lambda record: record.status is JobStatus.PAUSED)
            assert record.desired is Desired.PAUSED
            assert "version 1: since its best validation rewards.people has lost" in record.reason
            await fleet.store.jobs.request(record.id, "resume")  # it continues to the next validation
            record = await fleet.reached(record.id, lambda record: "version 2: " in record.reason)
            await fleet.store.jobs.request(record.id, "resume")  # and the last one pauses no job
        record = await fleet.succeeded(record.id)
        found = [row.values["val/disagreement"] for row in await fleet.store.history.validations(record.id)]
        assert found[0] == 0.0
        assert all(value is not None and value > 5 for value in found[1:]) if hacks else found[1:] == [0.0] * 3


async def test_a_job_pauses_when_its_held_out_reward_falls(run: Run, job: Job, tmp_path: Path) -> None:
    (tmp_path / "held_out.txt").write_text("held out 0\nheld out 1\nheld out 2\n")
    settings = job(
        data={"validation": str(tmp_path / "held_out.txt")},
        rewards={"ocr": {}},
        schedule={"steps": 4, "save_every": 1, "validate_every": 1, "max_reward_drop": 0.5},
    )
    trained: list[trainer_pb2.TrainStepRequest] = []

    def broken_once(sample: reward_pb2.RewardSample) -> float:
        """At version 2 all have low scores; at version 1 one held-out sample has, and the others have none."""
        score = (0.1 if len(trained) == 2 else 0.5) + 0.1 * (int(sample.sample_id.split("/")[2]) % 2)
        if len(trained) == 1 and sample.prompt.startswith("held out"):
            return 0.1 if sample.prompt == "held out 0" else float("nan")
        return score

    async with run(ocr=ScriptedReward(broken_once)) as fleet:
        trained = fleet.trainer.steps
        record = await fleet.submit(settings)
        record = await fleet.reached(record.id, lambda record: record.status is JobStatus.PAUSED)
        assert "version 2: since version 0 the held-out reward has lost" in record.reason
        await fleet.store.jobs.request(record.id, "resume")
        record = await fleet.succeeded(record.id)
        found = [row.values.get("val/reward_drop") for row in await fleet.store.history.validations(record.id)]
        assert [value is not None and value > 5 for value in found] == [False, False, True, False, False]
        assert found[1] is None, "one of three samples says nothing"
        assert record.progress.held_out_best == pytest.approx((0.5 + 0.6 + 0.5) / 3)


async def test_a_reward_of_held_out_samples_is_asked_about_no_others(run: Run, job: Job, tmp_path: Path) -> None:
    settings = job(
        data={"validation": str(tmp_path / "prompts.txt")},
        rewards={"ocr": {}, "judge": {"weight": 0.0, "held_out_only": True}},
    )
    async with run(ocr=ScriptedReward(by_index), judge=ScriptedReward(lambda sample: 0.5)) as fleet:
        record = await fleet.submit(settings)
        record = await fleet.succeeded(record.id)
        assert (sum(fleet.rewards["ocr"].sizes), sum(fleet.rewards["judge"].sizes)) == (2 * 8 + 2 * 3, 2 * 3)
        rows = [row.values for row in await fleet.store.history.metrics(record.id)]
        assert [row["val-core/rewards/judge/mean"] for row in rows if "val/reward" in row] == [0.5, 0.5]
        told = {name for row in rows for name in row if name.startswith("critic/rewards/")}
        assert "critic/rewards/ocr/mean" in told
        assert not [name for name in told if "judge" in name], "of training it says nothing"


async def test_throughput_is_a_second_and_accelerator_of_trainer_and_rollouts(run: Run, job: Job) -> None:
    settings = job(rewards={"ocr": {}}, trainer={"world_size": 2})
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        record = await fleet.submit(settings)
        await fleet.reached(record.id, lambda record: record.status is JobStatus.SUCCEEDED)
        rows = {row.step: row.values for row in await fleet.store.history.metrics(record.id)}
        one_replica, step_s = 1, rows[0]["timing_s/step"] or 0.0
        assert rows[0]["perf/throughput"] == pytest.approx(8 / step_s / (2 + one_replica))


class SlowReward(ScriptedReward):
    """One call at a time, half a second each."""

    def __init__(self) -> None:
        super().__init__(by_index)
        self.turn, self.num_here, self.most_here = asyncio.Lock(), 0, 0

    async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
        self.num_here += len(request.samples)
        self.most_here = max(self.most_here, self.num_here)
        try:
            async with self.turn:
                await asyncio.sleep(0.5)
                return await super().Score(request, context)
        finally:
            self.num_here -= len(request.samples)


async def test_a_step_does_not_run_into_the_deadline_of_a_slow_reward(
    run: Run, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight groups take four seconds, a call may take two: they wait in the controller, where no deadline runs."""
    monkeypatch.setattr(scoring, "MAX_SCORING", 8)
    slow = SlowReward()
    settings = job(
        rollout={"prompts_per_step": 8}, schedule={"steps": 1}, rewards={"ocr": {}}, timeouts={"score_s": 2.0}
    )
    async with run(ocr=slow) as fleet:
        record = await fleet.run(settings)
        assert record.results["samples_dropped"] == {}
    assert slow.sizes == [4] * 8
    assert slow.most_here == 8


async def test_the_reason_names_a_silent_rank_until_it_is_heard(
    run: Run, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "QUIET_S", 0.2)
    monkeypatch.setattr(watch, "LOOK_S", 0.1)
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        fleet.trainer.ranks = [
            trainer_pb2.RankProgress(rank=rank, phase="checkpoint", limit_s=1800.0, silence_s=120.0) for rank in (0, 1)
        ]
        async with fleet.trainer.turn:
            found = await fleet.submit(job(rewards={"ocr": {}}))
            waiting = await fleet.reached(found.id, lambda record: bool(record.reason))
            assert waiting.reason == (
                "rank 1 (phase checkpoint) gives no sign: the trainer is replaced if that lasts 120 s"
            )
            fleet.trainer.ranks = []
            await fleet.reached(found.id, lambda record: not record.reason)
        ended = await fleet.reached(found.id, lambda record: record.status.terminal)
        assert (ended.status, ended.reason) == (JobStatus.SUCCEEDED, "")
