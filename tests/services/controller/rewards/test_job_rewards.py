"""How the answers of several rewards become one score, against real gRPC servers that answer well and badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from flowfleet.job.spec import RewardPart, parse_job
from flowfleet.proto import reward_pb2, reward_pb2_grpc
from flowfleet.rewards.requests import EncodedSample
from services.controller.platforms.local.directory import StaticDirectory
from services.controller.prompts.sources import Sources
from services.controller.reading.places import Places
from services.controller.rewards.chunking import chunks, whole_groups
from services.controller.rewards.failures import RewardFailure, RewardPause
from services.controller.rewards.job_rewards import JobRewards, SampleScore, modality_of, preference
from tests.services.controller.reward_fleet import served
from tests.serving import started
from tests.waiting import until

Answer = Callable[[reward_pb2.RewardSample], reward_pb2.RewardScore | None]


class Scripted(reward_pb2_grpc.RewardServiceServicer):
    """Answers each sample by a function; keeps the sizes of the calls."""

    def __init__(self, answer: Answer, max_batch: int = 100, **described: Any) -> None:
        self.answer, self.sizes = answer, list[int]()
        self.described = {"max_batch_size": max_batch, **described}
        self.gate: asyncio.Event | None = None
        self.hangs = False
        """It takes connections and answers nothing."""

    async def Describe(self, request: Any, context: Any) -> reward_pb2.DescribeResponse:
        if self.hangs:
            await asyncio.sleep(60)
        return reward_pb2.DescribeResponse(name="scripted", **self.described)

    async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
        self.sizes.append(len(request.samples))
        if self.gate is not None:
            await self.gate.wait()
        answers = [self.answer(sample) for sample in reversed(request.samples)]
        return reward_pb2.ScoreResponse(scores=[answer for answer in answers if answer is not None])


def scored(value: float) -> Answer:
    return lambda sample: reward_pb2.RewardScore(
        sample_id=sample.sample_id, score=value, components={"half": value / 2}
    )


@dataclass
class Bound:
    """The rewards of a job and their parts."""

    job_rewards: JobRewards
    parts: dict[str, RewardPart]

    async def score(self, samples: list[EncodedSample], step: int = 0) -> dict[str, SampleScore]:
        async def fetch() -> list[EncodedSample]:
            return samples

        return await self.job_rewards.score(self.parts, step, {one.sample_id: "" for one in samples}, fetch)


@asynccontextmanager
async def with_plane(
    services: dict[str, Any],
    parts: dict[str, RewardPart],
    modality: reward_pb2.Modality.ValueType = reward_pb2.MODALITY_IMAGE,
) -> AsyncIterator[Bound]:
    async with served(services) as addresses:
        job_rewards = JobRewards(StaticDirectory(addresses), 5.0, modality)
        try:
            yield Bound(job_rewards, parts)
        finally:
            await job_rewards.close()


def samples(count: int) -> list[EncodedSample]:
    return [EncodedSample(b"x", "", "p", sample_id=str(k)) for k in range(count)]


async def test_scores_are_summed_by_weight_and_components_kept() -> None:
    services = {"a": Scripted(scored(0.5)), "b": Scripted(scored(2.0)), "unused": Scripted(scored(9.0))}
    parts = {"a": RewardPart(weight=1.0), "b": RewardPart(weight=-0.25)}
    async with with_plane(services, parts) as job_rewards:
        verdicts = await job_rewards.score(samples(3))
        assert {verdict.score for verdict in verdicts.values()} == {0.5 - 0.25 * 2.0}
        assert verdicts["1"].scores == {"a": 0.5, "a.half": 0.25, "b": 2.0, "b.half": 1.0}
        assert verdicts["1"].rewards == {"a": 0.5, "b": 2.0}
    assert services["unused"].sizes == []


@pytest.mark.parametrize(
    "bad",
    [
        lambda sample: None,
        lambda sample: reward_pb2.RewardScore(sample_id=sample.sample_id, error="no text"),
        lambda sample: reward_pb2.RewardScore(sample_id=sample.sample_id),
        lambda sample: reward_pb2.RewardScore(sample_id=sample.sample_id, score=float("nan")),
        lambda sample: reward_pb2.RewardScore(sample_id=sample.sample_id, score=float("inf")),
        lambda sample: reward_pb2.RewardScore(sample_id=sample.sample_id, score=1.7e308),  # its square is infinite
        lambda sample: reward_pb2.RewardScore(sample_id="another", score=1.0),
    ],
)
async def test_a_sample_without_a_finite_score_gets_a_reason_never_a_zero(bad: Answer) -> None:
    def answer(sample: reward_pb2.RewardSample) -> reward_pb2.RewardScore | None:
        return bad(sample) if sample.sample_id == "1" else scored(1.0)(sample)

    async with with_plane({"ocr": Scripted(answer)}, {"ocr": RewardPart()}) as job_rewards:
        verdicts = await job_rewards.score(samples(3))
        assert verdicts["1"].score is None
        assert verdicts["1"].reason == "no_score_ocr"
        assert [verdicts[name].score for name in "02"] == [1.0, 1.0]


async def test_calls_respect_the_batch_limit_of_the_service() -> None:
    service = Scripted(scored(1.0), max_batch=4)
    async with with_plane({"ocr": service}, {"ocr": RewardPart()}) as job_rewards:
        assert len(await job_rewards.score(samples(10))) == 10
    assert sorted(service.sizes) == [2, 4, 4]


async def test_calls_are_as_small_as_the_service_wishes_unless_it_wants_whole_groups() -> None:
    small, whole = (Scripted(scored(1.0), call_bytes=3 * 100, needs_group=needs_group) for needs_group in (False, True))
    async with with_plane({"a": small, "b": whole}, {"a": RewardPart(), "b": RewardPart()}) as job_rewards:
        assert len(await job_rewards.score(grouped(8))) == 8
    assert sorted(small.sizes) == [2, 3, 3]
    assert whole.sizes == [8]


def test_calls_stay_below_the_byte_limit_and_lose_nothing() -> None:
    big = [EncodedSample(bytes(1000 * k), "", "", sample_id=str(k)) for k in range(6)]
    calls = list(chunks(big, max_samples=3, max_bytes=4500))
    assert [sample.sample_id for call in calls for sample in call] == list("012345")
    assert [len(call) for call in calls] == [3, 1, 1, 1]
    wished = list(chunks(big, max_samples=3, wished_bytes=1500))
    assert [sample.sample_id for call in wished for sample in call] == list("012345")
    assert [len(call) for call in wished] == [2, 2, 2]


def grouped(*sizes: int) -> list[EncodedSample]:
    """Groups of samples, one behind the other."""
    return [
        EncodedSample(b"x" * 100, "", "", group_id=str(group), sample_id=f"{group}/{k}")
        for group, size in enumerate(sizes)
        for k in range(size)
    ]


async def test_a_reward_that_wants_groups_gets_each_whole() -> None:
    service = Scripted(scored(1.0), max_batch=4, needs_group=True)
    async with with_plane({"ocr": service}, {"ocr": RewardPart()}) as job_rewards:
        assert len(await job_rewards.score(grouped(3, 4, 1))) == 8
        with pytest.raises(RewardPause, match=r"rewards\.ocr scores whole groups of at most 4 samples: lower rollout"):
            await job_rewards.score(grouped(5))
    assert sorted(service.sizes) == [1, 3, 4]


def test_a_group_too_large_for_a_call_is_refused_not_cut() -> None:
    calls = whole_groups(grouped(1, 1), max_samples=10, max_bytes=50)
    assert [len(call) for call in calls] == [1, 1]  # one sample has its own call, whatever its size
    with pytest.raises(ValueError, match="over the 150 of a call"):
        list(whole_groups(grouped(1, 2), max_samples=10, max_bytes=150))


@pytest.mark.parametrize("limit", [0, 100])
async def test_no_limit_is_no_limit(limit: int) -> None:
    services = {"a": Scripted(scored(1.0), max_batch=limit, needs_group=True), "b": Scripted(scored(1.0), limit)}
    async with with_plane(services, {"a": RewardPart(), "b": RewardPart()}) as job_rewards:
        assert len(await job_rewards.score(grouped(30))) == 30
    assert services["a"].sizes == services["b"].sizes == [30]


@pytest.mark.parametrize(
    ("described", "modality", "refused"),
    [
        ([], reward_pb2.MODALITY_IMAGE, None),
        ([], reward_pb2.MODALITY_VIDEO, "videos"),
        ([reward_pb2.MODALITY_IMAGE], reward_pb2.MODALITY_VIDEO, "videos"),
        ([reward_pb2.MODALITY_VIDEO], reward_pb2.MODALITY_IMAGE, "pictures"),
        ([reward_pb2.MODALITY_IMAGE, reward_pb2.MODALITY_VIDEO], reward_pb2.MODALITY_VIDEO, None),
        ([reward_pb2.MODALITY_SOUND], reward_pb2.MODALITY_SOUND, None),
        ([reward_pb2.MODALITY_VIDEO], reward_pb2.MODALITY_SOUND, None),
        ([reward_pb2.MODALITY_SOUND], reward_pb2.MODALITY_VIDEO, "films of this job's model are silent"),
    ],
)
async def test_a_reward_must_score_what_the_job_makes(
    described: list[Any], modality: reward_pb2.Modality.ValueType, refused: str | None
) -> None:
    async with with_plane(
        {"ocr": Scripted(scored(1.0), modalities=described)}, {"ocr": RewardPart()}, modality
    ) as job_rewards:
        if refused is None:
            assert len(await job_rewards.score(samples(2))) == 2
        else:
            with pytest.raises(RewardPause, match=rf"rewards\.ocr (does not )?scores?.* {refused}: leave it out"):
                await job_rewards.score(samples(2))


@pytest.mark.parametrize(("model", "film"), [("WanPipeline", "VIDEO"), ("LTX2Pipeline", "SOUND"), ("", "SOUND")])
def test_videos_have_frames_and_those_of_some_models_sound(model: str, film: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": model}) if model else "")
    job = {"model": {"path": str(tmp_path)}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}}
    specs = [parse_job({**job, "rollout": {"num_frames": frames}}) for frames in (1, 9)]
    modalities = [modality_of(spec, Sources(Places.of([tmp_path], [], tmp_path / "state"))) for spec in specs]
    assert modalities == [reward_pb2.MODALITY_IMAGE, reward_pb2.Modality.Value(f"MODALITY_{film}")]


def test_of_a_preference_the_chosen_is_worth_one() -> None:
    chosen, rejected = preference(0), preference(1)
    assert (chosen.score, rejected.score) == (1.0, 0.0)
    assert (chosen.rewards, rejected.rewards) == ({"preference": 1.0}, {"preference": 0.0})


async def test_a_score_whose_sum_would_overflow_is_no_score() -> None:
    async with with_plane({"ocr": Scripted(scored(1e308))}, {"ocr": RewardPart(weight=1e6)}) as job_rewards:
        verdicts = await job_rewards.score(samples(1))
        assert verdicts["0"].score is None
        assert verdicts["0"].reason == "no_score_ocr"


# -- replicas that come and go ---------------------------------------------------------------------------------------


class Changing:
    """What there is of one reward, as a test says."""

    pools = None

    def __init__(self) -> None:
        self.rewards: dict[str, tuple[str, ...]] = {}
        self.why = ""

    def shortage(self, component: str, name: str) -> str:
        assert component == "reward"
        return self.why

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Replicas:
    """Real servers of one reward, each with its calls."""

    def __init__(self) -> None:
        self.directory = Changing()
        self.services: list[Scripted] = []
        self.servers: list[grpc.aio.Server] = []

    async def add(self, **described: Any) -> str:
        service = Scripted(scored(1.0), **described)
        server, address = await started(service)
        self.services.append(service)
        self.servers.append(server)
        return address

    def show(self, *addresses: str) -> None:
        self.directory.rewards = {"ocr": addresses}

    @property
    def calls(self) -> list[int]:
        return [len(service.sizes) for service in self.services]


@asynccontextmanager
async def with_replicas() -> AsyncIterator[tuple[Bound, Replicas]]:
    replicas = Replicas()
    job_rewards = JobRewards(replicas.directory, deadline_s=5.0)
    try:
        yield Bound(job_rewards, {"ocr": RewardPart()}), replicas
    finally:
        await job_rewards.close()
        await asyncio.gather(*(server.stop(None) for server in replicas.servers))


async def test_one_replica_is_filled_before_the_next_is_asked() -> None:
    async with with_replicas() as (job_rewards, replicas):
        replicas.show(*[await replicas.add(max_batch=4) for _ in range(3)])
        await job_rewards.score(samples(8))  # one call is scored, the next waits
        assert replicas.calls == [2, 0, 0]
        await job_rewards.score(samples(12))
        assert replicas.calls == [4, 1, 0]


async def test_replicas_that_are_full_share_the_rest_and_a_new_one_gets_its_share() -> None:
    async with with_replicas() as (job_rewards, replicas):
        one, two, three = [await replicas.add(max_batch=1) for _ in range(3)]
        replicas.show(one, two)
        assert len(await job_rewards.score(samples(8))) == 8
        assert replicas.calls == [4, 4, 0]
        replicas.show(two, three)
        assert len(await job_rewards.score(samples(8))) == 8
        assert replicas.calls == [4, 8, 4]


async def test_without_a_replica_a_job_waits_and_says_for_what() -> None:
    async with with_replicas() as (job_rewards, replicas):
        replicas.directory.rewards = {"jpeg": ()}
        with pytest.raises(RewardFailure, match=r"^rewards.ocr: reward service 'ocr' is gone; there are: jpeg$"):
            await job_rewards.score(samples(1))
        replicas.show()
        with pytest.raises(RewardFailure, match=r"^rewards.ocr: reward service 'ocr' has no replica that is ready$"):
            await job_rewards.score(samples(1))
        replicas.directory.why = "0/3 nodes are available: 3 Insufficient cpu."
        with pytest.raises(
            RewardFailure, match="no replica that is ready: 0/3 nodes are available: 3 Insufficient cpu"
        ):
            await job_rewards.score(samples(1))
        replicas.show(await replicas.add())
        assert len(await job_rewards.score(samples(1))) == 1


async def test_a_replica_that_is_gone_but_still_shown_is_asked_last() -> None:
    async with with_replicas() as (job_rewards, replicas):
        one, two = await replicas.add(max_batch=1), await replicas.add(max_batch=1)
        replicas.show(one, two)
        await job_rewards.score(samples(2))
        await replicas.servers[0].stop(None)
        assert len(await job_rewards.score(samples(4))) == 4
        assert replicas.calls == [2, 4]


async def test_a_dead_replica_that_was_never_asked_keeps_nobody_waiting() -> None:
    async with with_replicas() as (job_rewards, replicas):
        dead, alive = await replicas.add(), await replicas.add(max_batch=2)
        await replicas.servers[0].stop(None)
        replicas.show(dead, alive)
        assert len(await job_rewards.score(samples(4))) == 4
        replicas.show(dead)
        with pytest.raises(RewardFailure, match=f"^rewards.ocr: service 'ocr' at {dead} cannot be reached"):
            await job_rewards.score(samples(1))


async def test_a_call_ends_well_though_its_replica_is_no_longer_shown() -> None:
    async with with_replicas() as (job_rewards, replicas):
        gate = asyncio.Event()
        one, two = await replicas.add(), await replicas.add()
        replicas.services[0].gate = gate
        replicas.show(one)
        draining = asyncio.create_task(job_rewards.score(samples(1)))
        await until(lambda: replicas.calls[0])
        replicas.show(two)
        assert len(await job_rewards.score(samples(1))) == 1
        gate.set()
        assert (await draining)["0"].score == 1.0


async def test_while_versions_are_mixed_calls_suit_all_of_them() -> None:
    async with with_replicas() as (job_rewards, replicas):
        replicas.show(await replicas.add(max_batch=8), await replicas.add(max_batch=2))
        await job_rewards.score(samples(8))
        assert max(size for service in replicas.services for size in service.sizes) == 2


async def test_a_replica_that_hangs_keeps_nobody_waiting() -> None:
    """Neither for its Describe nor, unknown as it is, for scores."""
    async with with_replicas() as (job_rewards, replicas):
        hung, well = await replicas.add(), await replicas.add(max_batch=2)
        replicas.services[0].hangs = True
        replicas.show(hung, well)
        for _ in range(3):
            assert len(await asyncio.wait_for(job_rewards.score(samples(4)), 5)) == 4
        assert replicas.calls == [0, 6]
        before = asyncio.all_tasks()
        await job_rewards.job_rewards.close()
        assert not [task for task in before if not task.done() and "_describe" in repr(task)]
