"""Rewards replaced in a job that runs, through the whole control plane on a fleet without models: the boundary, what
each sample was scored by, and shadows that no step waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from flowfleet.api.jobs import Desired, JobStatus
from flowfleet.api.rewards import RewardRevision
from flowfleet.job.spec import RewardPart
from flowfleet.proto import reward_pb2
from flowfleet.redis import keys
from flowfleet.rewards.changes import RewardChange, RewardSet, changed
from services.controller.job import shadow_queue
from services.controller.job.shadow_queue import pair_of
from services.controller.rewards.comparison import compare
from services.controller.rewards.failures import RewardFailure
from services.controller.rewards.job_rewards import JobRewards
from services.controller.store.records import JobRecord, reward_set
from tests.services.controller import test_control_plane
from tests.services.controller.reward_fleet import Service, samples, with_services
from tests.services.controller.scripted import ScriptedFleet, ScriptedReward
from tests.services.controller.test_control_plane import Run, by_index

run, job = test_control_plane.run, test_control_plane.job
STEPS = 6
SCHEDULE = {"steps": STEPS, "save_every": 3, "validate_every": 2}


class HeldReward(ScriptedReward):
    """Waits at some steps until it is let go."""

    def __init__(self, score: Any, *steps: int, **described: Any) -> None:
        super().__init__(score, **described)
        self.gates = {str(step): asyncio.Event() for step in steps}

    async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
        step = request.samples[0].sample_id.split("/")[1]
        if step in self.gates:
            await self.gates[step].wait()
        return await super().Score(request, context)


async def change(fleet: ScriptedFleet, job_id: str, **parts: Any) -> JobRecord:
    """Changes rewards like the REST API; returns once the job has applied the change."""
    record = await fleet.store.jobs.get(job_id)
    number = record.rewards.revision + 1
    wanted = RewardChange.model_validate({"revision": number - 1, **parts})
    after: RewardSet = changed(record.job_spec(), reward_set(record.rewards.newest), wanted)
    revision = RewardRevision(
        number=number, changes=wanted.describe(), open_steps=wanted.open_steps, **after.model_dump(mode="json")
    )
    await fleet.store.rewards.change(job_id, revision)
    return await fleet.reached(job_id, lambda record: record.rewards.active.number == number)


async def versions(fleet: ScriptedFleet, job_id: str) -> dict[int, set[str]]:
    samples, _ = await fleet.store.samples.page(job_id, limit=500)
    assert len(samples) == STEPS * 8
    return {step: {sample.versions["ocr"] for sample in samples if sample.step == step} for step in range(STEPS)}


async def test_a_shadow_is_compared_then_promoted_at_a_boundary(run: Run, job: Any) -> None:
    first = HeldReward(by_index, 1, 3, name="ocr", version="1")
    second = ScriptedReward(lambda sample: 1.0 - by_index(sample), name="ocr", version="2")
    settings = job(rewards={"ocr": {"service": "first"}}, schedule=SCHEDULE)
    async with run(first=first, second=second) as fleet:
        job_id = (await fleet.submit(settings)).id
        await fleet.reached(job_id, lambda record: record.progress.step == 1)
        record = await change(fleet, job_id, shadow={"ocr2": {"for": "ocr", "service": "second"}})
        assert record.rewards.active.from_step == 2
        first.gates["1"].set()
        await fleet.reached(job_id, lambda record: record.progress.step == 3)
        active = reward_set((await fleet.store.jobs.get(job_id)).rewards.active)
        pair = pair_of("ocr2", active.shadows["ocr2"], "ocr", active.rewards["ocr"])
        while (counts := await fleet.store.shadows.counts(job_id, pair)).get("scored") != 8:
            await asyncio.sleep(0.02)
        found = compare(await fleet.store.shadows.scores(job_id, pair, "train"))
        assert (found.samples, found.groups, found.failed, counts["failed"]) == (8, 2, 0, 0)
        assert (found.spearman, found.agreement) == (pytest.approx(-1.0), 0.0)
        assert (found.active.mean, found.shadow.mean) == (0.375, 0.625)  # of 0, 0.25, 0.5, 0.75
        assert (found.active.versions, found.shadow.versions) == (["ocr 1"], ["ocr 2"])
        record = await change(fleet, job_id, promote=["ocr2"])
        assert record.rewards.active.from_step == 4
        first.gates["3"].set()
        record = await fleet.succeeded(job_id)
        assert record.results["samples_trained"] == STEPS * 8
        assert record.progress.rewards_changed == [4], "the shadow changed no reward"
        assert len(fleet.trainer.steps) == STEPS
        assert await versions(fleet, job_id) == {step: {"ocr 1" if step < 4 else "ocr 2"} for step in range(STEPS)}
        rows = await fleet.store.history.metrics(job_id)
        assert [row.values["critic/rewards/revision"] for row in rows] == [0, 0, 1, 1, 2, 2]
        samples, _ = await fleet.store.samples.page(job_id, step=2, limit=500)
        assert {(s.index, s.shadow["ocr2"]) for s in samples} == {(i, 1 - i / 4) for i in range(4)}
        told = [event.data for event in await fleet.store.events.read(job_id, limit=1000) if event.type == "rewards"]
        assert [(each["number"], each["from_step"]) for each in told] == [(1, 2), (2, 4)]


async def test_totals_by_other_rewards_are_no_fall(run: Run, job: Any, tmp_path: Path) -> None:
    """A lower weight makes all later totals lower; they are compared with each other alone."""
    ocr = HeldReward(lambda sample: by_index(sample) / 10 + int(sample.sample_id.split("/")[2]) % 2, 1)
    data = {"validation": str(tmp_path / "prompts.txt")}
    settings = job(rewards={"ocr": {}}, data=data, schedule={**SCHEDULE, "max_reward_drop": 0.5})
    async with run(ocr=ocr) as fleet:
        job_id = (await fleet.submit(settings)).id
        await fleet.reached(job_id, lambda record: record.progress.step == 1)
        await change(fleet, job_id, set={"ocr": {"weight": 0.01}})
        ocr.gates["1"].set()
        record = await fleet.reached(job_id, lambda record: record.status is not JobStatus.RUNNING)
        assert record.status is JobStatus.SUCCEEDED, record.reason
        found = await fleet.store.history.validations(job_id)
        assert [one.values["val/reward_drop"] for one in found] == [0.0] * 4
        assert (found[0].reward, found[-1].reward) == (pytest.approx(1 / 3), pytest.approx(1 / 300))


async def test_a_shadow_sees_no_training_samples_where_its_reward_sees_none(run: Run, job: Any, tmp_path: Path) -> None:
    first, second = HeldReward(by_index, 1), ScriptedReward(by_index)
    judge = {"service": "judge", "weight": 0.0, "held_out_only": True}
    settings = job(
        data={"validation": str(tmp_path / "prompts.txt")},
        rewards={"ocr": {"service": "first"}, "judge": judge},
        schedule=SCHEDULE,
    )
    async with run(first=first, second=second, judge=ScriptedReward(by_index)) as fleet:
        job_id = (await fleet.submit(settings)).id
        await fleet.reached(job_id, lambda record: record.progress.step == 1)
        await change(fleet, job_id, shadow={"judge2": {"for": "judge", "service": "second"}})
        first.gates["1"].set()
        await fleet.succeeded(job_id)
        assert second.sizes
        assert set(second.sizes) == {3}, "validations have three prompts, groups four samples"


async def test_weights_and_new_rewards_count_from_their_step(run: Run, job: Any) -> None:
    """The trainer's totals of each step are of the rewards of that step."""
    first = HeldReward(by_index, 1)
    settings = job(rewards={"ocr": {"service": "first"}}, schedule=SCHEDULE)
    async with run(first=first, second=ScriptedReward(lambda sample: 1.0)) as fleet:
        job_id = (await fleet.submit(settings)).id
        await fleet.reached(job_id, lambda record: record.progress.step == 1)
        await change(fleet, job_id, set={"ocr": {"weight": 0.5}, "second": {"weight": 2.0}})
        first.gates["1"].set()
        await fleet.succeeded(job_id)
        for step, request in enumerate(fleet.trainer.steps):
            expected = [i / 4 if step < 2 else 0.5 * i / 4 + 2.0 for i in range(4)]
            assert [sample.reward for sample in request.samples] == pytest.approx(expected * 2)


class PickyReward(ScriptedReward):
    """Refuses calls without its param."""

    async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
        if request.params.get("score") != "soft":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "score: choose soft")
        return await super().Score(request, context)


async def test_wrong_params_pause_the_job_and_right_ones_let_it_go_on(run: Run, job: Any) -> None:
    """They reach the step that is open, for nothing of it is scored; no step is lost, and none is done twice."""
    first = HeldReward(by_index, 1)
    picky = PickyReward(by_index, name="ocr", version="2")
    settings = job(rewards={"ocr": {"service": "first"}}, schedule=SCHEDULE)
    async with run(first=first, second=picky) as fleet:
        job_id = (await fleet.submit(settings)).id
        await fleet.reached(job_id, lambda record: record.progress.step == 1)
        await change(fleet, job_id, set={"ocr": {"service": "second"}})
        first.gates["1"].set()
        record = await fleet.reached(job_id, lambda record: record.status is JobStatus.PAUSED)
        assert "score: choose soft" in record.reason
        await fleet.store.jobs.request(job_id, "resume")
        await fleet.reached(job_id, lambda record: record.desired is Desired.PAUSED)  # it was refused again
        await fleet.reached(job_id, lambda record: record.status is JobStatus.PAUSED)
        record = await change(fleet, job_id, set={"ocr": {"params": {"score": "soft"}}})
        assert (record.status, record.rewards.active.from_step) == (JobStatus.PAUSED, 2)
        await fleet.store.jobs.request(job_id, "resume")
        record = await fleet.succeeded(job_id)
        assert record.results["samples_trained"] == STEPS * 8
        assert len(fleet.trainer.steps) == STEPS
        found = await versions(fleet, job_id)
        assert [len(each) for each in found.values()] == [1] * STEPS
        rows = await fleet.store.history.metrics(job_id)
        assert [row.values["critic/rewards/revision"] for row in rows] == [0, 0, 2, 2, 2, 2]


async def test_what_was_scored_with_other_settings_is_not_taken_for_the_present_ones() -> None:
    """One call failed and another succeeded, whose params changed before both were sent again."""
    good, bad = Service(), Service()
    bad.code = grpc.StatusCode.INTERNAL
    async with with_services({"good": good, "bad": bad}) as fleet:
        with pytest.raises(RewardFailure):
            await fleet.score({"good": RewardPart(), "bad": RewardPart()}, 0, samples("a"))
        bad.code = None
        await fleet.score({"good": RewardPart(params={"k": "v"}), "bad": RewardPart()}, 0, samples("a"))
    assert good.params == [{}, {"k": "v"}]


class WholeGroups(ScriptedReward):
    """Refuses one sample of each step's first group, and says what it thinks of calls that are no whole group."""

    def __init__(self) -> None:
        super().__init__(by_index, needs_group=True)
        self.calls: list[int] = []

    async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
        self.calls.append(len(request.samples))
        answer = await super().Score(request, context)
        for score in answer.scores:
            if score.sample_id.endswith("/0/1"):
                score.error = "unreadable"
        return answer


async def test_a_reward_that_needs_groups_never_gets_a_sample_alone(run: Run, job: Any) -> None:
    """A sample that it refuses is not made again, and held-out samples are not sent to it."""
    grouped = WholeGroups()
    data = {"validation": job()["data"]["train"]}
    parts = {"schedule": {**SCHEDULE, "steps": 2}}
    settings = job(rewards={"whole": {}}, data=data, **parts)
    async with run(whole=grouped) as fleet:
        record = await fleet.run(settings)
        assert record.results["samples_dropped"] == {"no_score_whole": 2}
        assert record.results["samples_trained"] == 2 * 8 - 2
        assert record.results["held_out_reward"] is None
        events = await fleet.store.events.read(record.id, limit=1000)
        assert [event.data["reward"] for event in events if event.type == "not_validated"] == ["whole"]
    assert set(grouped.calls) == {4}


async def test_a_shadow_outlives_closed_channels_and_ends_with_its_removal(
    run: Run, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, faults = HeldReward(by_index, 1, 4), iter([asyncio.CancelledError(), KeyError("x"), RuntimeError("y")])
    ask = JobRewards.ask

    async def failing(job_rewards: JobRewards, name: str, *rest: Any) -> Any:
        if name == "late" and (fault := next(faults, None)) is not None:
            raise fault
        return await ask(job_rewards, name, *rest)

    monkeypatch.setattr(JobRewards, "ask", failing)
    async with run(first=first, second=ScriptedReward(lambda sample: 1.0)) as fleet:
        job_id = (await fleet.submit(job(rewards={"ocr": {"service": "first"}}, schedule=SCHEDULE))).id
        await fleet.reached(job_id, lambda record: record.progress.step == 1)
        record = await change(fleet, job_id, shadow={"late": {"for": "ocr", "service": "second"}})
        active = reward_set(record.rewards.active)
        pair = pair_of("late", active.shadows["late"], "ocr", active.rewards["ocr"])
        first.gates["1"].set()
        await fleet.reached(job_id, lambda record: record.progress.step == 4)
        while not (counts := await fleet.store.shadows.counts(job_id, pair)).get("scored"):
            await asyncio.sleep(0.02)
        assert counts["left_out"] > 0
        await change(fleet, job_id, remove=["late"])
        first.gates["4"].set()
        record = await fleet.succeeded(job_id)
        assert await fleet.redis.ttl(keys.shadow(job_id, pair, "counts")) > 0


@pytest.mark.parametrize("kind", ["stuck", "broken"])
async def test_nobody_waits_for_a_shadow(
    run: Run,
    job: Any,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that never answers leaves groups out, one that gives rubbish fails; both are counted, the job continues."""
    monkeypatch.setattr(shadow_queue, "MAX_WAITING", 1)
    first = HeldReward(by_index, 1)
    steps = range(STEPS + 1) if kind == "stuck" else ()
    shadow = HeldReward(lambda sample: float("nan"), *steps)
    async with run(first=first, second=shadow) as fleet:
        job_id = (await fleet.submit(job(rewards={"ocr": {"service": "first"}}, schedule=SCHEDULE))).id
        await fleet.reached(job_id, lambda record: record.progress.step == 1)
        record = await change(fleet, job_id, shadow={"late": {"for": "ocr", "service": "second"}})
        active = reward_set(record.rewards.active)
        pair = pair_of("late", active.shadows["late"], "ocr", active.rewards["ocr"])
        first.gates["1"].set()
        record = await fleet.succeeded(job_id)
        assert record.results["samples_trained"] == STEPS * 8
        counts: Mapping[str, int] = await fleet.store.shadows.counts(job_id, pair)
        asked = (STEPS - 2) * 8 if kind == "broken" else 3 * 4  # two run, one waits
        assert counts.get("scored", 0) == 0
        if kind == "stuck":
            assert counts["left_out"] == (STEPS - 2) * 8 - asked
        else:
            assert 0 < counts["failed"] <= asked
        for gate in shadow.gates.values():
            gate.set()
