"""What a controller does about a trainer that lacks a reward's gradients, without a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from flowfleet.data.lineage import follow
from flowfleet.job.spec import RewardPart, parse_job
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto.common_pb2 import Sample, SampleId
from flowfleet.proto.trainer_pb2 import TrainSample, TrainStepRequest, TrainStepResponse
from services.controller.platforms.local.directory import StaticDirectory
from services.controller.rewards.failures import RewardFailure, RewardPause
from services.controller.rewards.gradients import GradientRewards, told, trains_on

SPEC = parse_job(
    {
        "model": {"path": "model"},
        "data": {"train": "prompts.txt"},
        "rewards": {"judge": {"service": "vlm"}},
        "algorithm": {"name": "srpo"},
        "timeouts": {"rewards_s": 60.0},
    }
)


@dataclass
class Trainer:
    """Answers with these, one after the other, and keeps what it was sent."""

    answers: list[TrainStepResponse]
    sent: list[TrainStepRequest] = field(default_factory=list)

    async def __call__(self, request: TrainStepRequest) -> TrainStepResponse:
        self.sent.append(request)
        return self.answers.pop(0)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def request() -> TrainStepRequest:
    samples = [TrainSample(sample=Sample(id=SampleId(job_id="job", group=group))) for group in (0, 0, 1)]
    made = TrainStepRequest(job_id="job", step=0, samples=samples)
    prompts = [Prompt("a cat", {"tag": "cat"}), Prompt("a dog"), Prompt("none is trained on")]

    def weights(prompt: Prompt) -> Mapping[str, float]:
        return {"judge": 2.0, "ocr": 0.0} if prompt.text == "a cat" else {"judge": 1.0}

    told(made, prompts, weights, {"judge": RewardPart(service="vlm", params={"page": "x"}), "ocr": RewardPart()})
    return made


def failure(*, permanent: bool = False) -> TrainStepResponse:
    return TrainStepResponse(reward_failure="the service is gone", failed_reward="judge", is_permanent=permanent)


def rewards(clock: Clock) -> GradientRewards:
    return GradientRewards(StaticDirectory({"vlm": "10.0.0.7:9000"}), SPEC, clock)


def test_a_request_says_what_rewards_are_asked_and_only_those_that_count() -> None:
    made = request()
    assert [(one.name, one.service, dict(one.params)) for one in made.gradient_rewards] == [
        ("judge", "vlm", {"page": "x"})
    ]
    assert [(one.group, one.text, dict(one.metadata), dict(one.weights)) for one in made.prompts] == [
        (0, "a cat", {"tag": "cat"}, {"judge": 2.0}),
        (1, "a dog", {}, {"judge": 1.0}),
    ]


async def test_addresses_of_today_are_sent_and_are_no_part_of_the_step() -> None:
    made, trainer = request(), Trainer([TrainStepResponse(step=0)])
    await rewards(Clock()).trained(made, trainer)
    (sent,) = trainer.sent
    assert list(sent.gradient_rewards[0].addresses) == ["10.0.0.7:9000"]
    assert list(made.gradient_rewards[0].addresses) == []
    assert follow({}, sent) == follow({}, made) != ""


async def test_a_reward_that_fails_is_waited_for_less_and_less_often_and_then_pauses() -> None:
    clock, trainer = Clock(), Trainer([failure() for _ in range(5)])
    asked = rewards(clock)
    waits = []
    for now in (0.0, 10.0, 59.0):
        clock.now = now
        with pytest.raises(RewardFailure) as waiting:
            await asked.trained(request(), trainer)
        waits.append(waiting.value.again_s)
    assert waits == [0.5, 1.0, 2.0]
    clock.now = 60.0
    with pytest.raises(RewardPause, match=r"It failed for timeouts\.rewards_s = 60 s") as pause:
        await asked.trained(request(), trainer)
    assert "rewards.judge.on_failure" in str(pause.value)
    clock.now = 61.0  # the job was resumed
    with pytest.raises(RewardFailure):
        await asked.trained(request(), trainer)


async def test_success_and_a_resumed_job_count_anew() -> None:
    clock, trainer = Clock(), Trainer([failure(), TrainStepResponse(), failure(), failure()])
    asked = rewards(clock)
    for now, is_failing in ((0.0, True), (50.0, False), (100.0, True)):
        clock.now = now
        if not is_failing:
            await asked.trained(request(), trainer)
            continue
        with pytest.raises(RewardFailure):
            await asked.trained(request(), trainer)
    asked.reset()
    clock.now = 1000.0
    with pytest.raises(RewardFailure):
        await asked.trained(request(), trainer)


async def test_what_somebody_must_change_first_pauses_at_once() -> None:
    with pytest.raises(RewardPause, match=r"is gone\. The job is paused as rewards\.judge\.on_failure"):
        await rewards(Clock()).trained(request(), Trainer([failure(permanent=True)]))


def test_rewards_are_trained_on_where_they_weigh_at_some_step_of_some_source() -> None:
    base = {"model": {"path": "model"}, "rewards": {"judge": {}, "ocr": {"weight": 0.0}}}
    sources = [{"name": "a", "path": "a.txt", "rewards": {"judge": 1.0}}, {"name": "b", "path": "b.txt"}]
    mixed = parse_job(base | {"data": {"sources": sources}, "algorithm": {"name": "srpo"}})
    plain = parse_job(base | {"data": {"train": "a.txt"}})
    judge, later, never = RewardPart(), RewardPart(curve=((0, 0.0), (9, 1.0))), RewardPart(weight=0.0)
    assert trains_on(mixed, "judge", judge)
    assert trains_on(mixed, "judge", later)
    assert not trains_on(mixed, "judge", never)
    assert not trains_on(plain, "judge", judge)
