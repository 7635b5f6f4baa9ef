"""Changing a job's rewards through the API, up to where its driver takes them up; real reward services over gRPC."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from flowfleet.api.rewards import Comparison
from flowfleet.job.spec import RewardPart, parse_job
from flowfleet.media.files import decode_media
from flowfleet.proto import reward_pb2, reward_pb2_grpc
from flowfleet.redis import keys
from services.controller.api import dependencies
from services.controller.api.dependencies import Comparisons
from services.controller.api.routes import rewards as api_rewards
from services.controller.job.shadow_queue import pair_of
from services.controller.rewards.comparison import GroupScores, compare
from services.controller.rewards.trials import refusals
from services.controller.settings import ControllerSettings
from services.controller.store.records import SampleRecord, reward_set
from services.controller.store.shadows import SHADOW_TTL_S
from tests.services.controller.conftest import Api, serve
from tests.services.controller.reward_fleet import served

MakeJob = Callable[..., dict[str, Any]]


class Service(reward_pb2_grpc.RewardServiceServicer):
    """Describes itself."""

    def __init__(self, contract: int = 1, modality: reward_pb2.Modality.ValueType = reward_pb2.MODALITY_IMAGE) -> None:
        self.asked: list[reward_pb2.ScoreRequest] = []
        self.answer = reward_pb2.DescribeResponse(name="a", version="1", contract=contract, modalities=[modality])

    async def Describe(self, request: Any, context: Any) -> reward_pb2.DescribeResponse:
        return self.answer

    async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
        """Knows the parameter `score` alone and rejects a trial's samples, which must not refuse the change."""
        self.asked.append(request)
        if request.params.keys() - {"score"}:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "params: there is only score")
        errors = [reward_pb2.RewardScore(sample_id=sample.sample_id, error="no text") for sample in request.samples]
        return reward_pb2.ScoreResponse(scores=errors)


@pytest.fixture
def services() -> dict[str, Service]:
    """Services that each answer in their own way."""
    return {
        "ocr": Service(),
        "v2": Service(),
        "newer": Service(contract=99),
        "videos": Service(modality=reward_pb2.MODALITY_VIDEO),
    }


@pytest.fixture
async def addresses(services: dict[str, Service]) -> AsyncIterator[dict[str, str]]:
    async with served(services) as found:
        yield found | {"away": "127.0.0.1:1"}


@pytest.fixture
async def api(settings: ControllerSettings, addresses: dict[str, str], tmp_path: Path) -> AsyncIterator[Api]:
    """Half of the services come from the file, which is written while the controller runs."""
    file = tmp_path / "rewards.toml"
    flags = {"ocr": addresses.pop("ocr")}
    async with serve(settings.model_copy(update={"rewards": flags, "rewards_file": file})) as api:
        file.write_text("".join(f'{name} = "{address}"\n' for name, address in addresses.items()))
        yield api


async def patch(api: Api, job_id: str, revision: int, **change: Any) -> httpx.Response:
    return await api.client.patch(f"/v1/jobs/{job_id}/rewards", json={"revision": revision, **change})


async def take_up(api: Api, job_id: str, from_step: int) -> None:
    """What the job's driver does."""
    pending = await api.store.rewards.pending(job_id)
    assert pending is not None
    for _ in range(2):  # it died before it knew, and does it again
        async with api.services.redis.pipeline(transaction=True) as pipe:
            await api.store.rewards.apply(job_id, pending.model_copy(update={"from_step": from_step}), pipe)
            await pipe.execute()


async def test_a_shadow_is_added_compared_and_promoted(api: Api, job: MakeJob) -> None:
    job_id = (await api.submit(job(rewards={"ocr": {"weight": 2.0, "params": {"score": "edit"}}})))["id"]
    seen = (await api.client.get(f"/v1/jobs/{job_id}/rewards")).json()
    assert (seen["revision"], seen["pending"], seen["comparison"]) == (0, None, {})

    asked = await patch(api, job_id, 0, shadow={"ocr2": {"for": "ocr", "service": "v2", "params": {"score": "soft"}}})
    assert asked.status_code == 202, asked.text
    assert asked.json()["revision"] == asked.json()["pending"]["number"] == 1
    assert asked.json()["active"]["shadows"] == {}
    again = await patch(api, job_id, 0, shadow={"ocr2": {"for": "ocr", "service": "v2", "params": {"score": "soft"}}})
    assert (again.status_code, again.json()["revision"]) == (202, 1)  # its answer was lost: done once
    await take_up(api, job_id, 3)
    active = reward_set((await api.store.jobs.get(job_id)).rewards.active)
    pair = pair_of("ocr2", active.shadows["ocr2"], "ocr", active.rewards["ocr"])
    rows = [GroupScores(step=3, group=g, active=[0.0, 1.0], shadow=[0.1, 0.2]) for g in (0, 1, 1)]
    await api.store.shadows.add(job_id, pair, "train", rows)
    await api.store.shadows.count(job_id, pair, {"scored": 4, "failed": 1})

    seen = (await api.client.get(f"/v1/jobs/{job_id}/rewards")).json()
    compared = seen["comparison"]["ocr2"]
    assert seen["pending"] is None
    assert (compared["beside"], compared["scored"], compared["failed"], compared["left_out"]) == ("ocr", 4, 1, 0)
    assert (compared["train"]["samples"], compared["train"]["agreement"]) == (4, 1.0)  # a group counts once

    assert (await patch(api, job_id, 1, promote=["ocr2"])).status_code == 202
    await take_up(api, job_id, 5)
    seen = (await api.client.get(f"/v1/jobs/{job_id}/rewards")).json()
    ocr = seen["active"]["rewards"]["ocr"]
    assert (ocr["service"], ocr["params"], ocr["weight"]) == ("v2", {"score": "soft"}, 2.0)
    assert (seen["active"]["shadows"], seen["comparison"]) == ({}, {})
    assert [(r["number"], r["from_step"]) for r in seen["history"]] == [(0, 0), (1, 3), (2, 5)]
    assert seen["history"][2]["changes"] == ["promote ocr2"]
    events = [event for event in await api.store.events.read(job_id) if event.type == "rewards"]
    assert [(event.data["number"], event.data["from_step"]) for event in events] == [(1, 3), (2, 5)]
    record = (await api.client.get(f"/v1/jobs/{job_id}")).json()
    assert "service" not in (record["spec"]["rewards"]["ocr"]["params"])
    assert record["spec"]["rewards"]["ocr"]["params"] == {"score": "edit"}  # as submitted


async def test_two_who_change_at_once_hear_of_each_other(api: Api, job: MakeJob) -> None:
    job_id = (await api.submit(job()))["id"]
    assert (await patch(api, job_id, 0, set={"ocr": {"weight": 0.5}})).status_code == 202
    late = await patch(api, job_id, 0, set={"ocr": {"weight": 0.7}})
    assert late.status_code == 409
    assert "revision 1" in late.json()["detail"]
    assert (await patch(api, job_id, 1, set={"second": {"service": "v2"}})).status_code == 202
    await take_up(api, job_id, 0)
    seen = (await api.client.get(f"/v1/jobs/{job_id}/rewards")).json()
    assert {name: part["weight"] for name, part in seen["active"]["rewards"].items()} == {"ocr": 0.5, "second": 1.0}
    assert len(seen["history"][1]["changes"]) == 2  # the first was not taken up before the second came


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"set": {"ocr": {"wieght": 1}}}, 422, "did you mean rewards.ocr.weight?"),
        ({"set": {"ocr": {"weight": "x"}}}, 422, "rewards.ocr.weight"),
        ({"set": {"missing": {}}}, 422, "knows no reward service 'missing'"),
        ({"set": {"ocr": {"weight": 0}}}, 422, "rewards"),
        ({"set": {"videos": {}}}, 422, "does not score pictures"),
        ({"set": {"newer": {}}}, 422, "contract 99"),
        ({"set": {"ocr": {"params": {"scroe": "soft"}}}}, 422, "params: there is only score"),
        ({"set": {"v2": {"params": {"scroe": "soft"}}}}, 422, "params: there is only score"),
        ({"shadow": {"v2": {"for": "ocr", "params": {"scroe": "soft"}}}}, 422, "params: there is only score"),
        ({"set": {"away": {}}}, 409, "cannot be reached"),
        ({"set": {"ocr": {"service": "grpc://10.0.0.1:22"}}}, 422, "knows no reward service"),
        ({"shadow": {"away": {"for": "ocr"}}}, 409, "cannot be reached"),
        ({"shadow": {"v2": {"for": "absent"}}}, 422, "shadow.v2.for"),
        ({"shadow": {"v2": {}}}, 422, "shadow.v2.for"),
        ({"shadow": {"ocr": {"for": "ocr", "service": "v2"}}}, 422, "the name of an active reward"),
        ({"shadow": {"a b": {"for": "ocr", "service": "v2"}}}, 422, "shadow.a b: name it"),
        ({"promote": ["ocr"]}, 422, "promote.ocr: there is no such shadow"),
        ({"remove": ["ocr"]}, 422, "rewards"),
        ({"remove": ["absent"]}, 422, "remove.absent"),
        ({}, 422, "nothing to change"),
        ({"sets": {}}, 422, "sets"),
        ({"set": {"ocr": {"weight": 2}}, "revision": 5}, 409, "revision"),
    ],
)
async def test_what_is_refused_is_told_and_changes_nothing(
    api: Api, job: MakeJob, change: dict[str, Any], status: int, words: str
) -> None:
    job_id = (await api.submit(job()))["id"]
    before = await api.store.jobs.get(job_id)
    answer = await patch(api, job_id, **({"revision": 0} | change))
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert words in answer.text
    assert await api.store.jobs.get(job_id) == before


@pytest.mark.parametrize(("frames", "service", "media_type"), [(1, "v2", "image/png"), (5, "videos", "video/mp4")])
async def test_params_are_tried_on_a_sample_like_the_jobs(
    api: Api, job: MakeJob, services: dict[str, Service], frames: int, service: str, media_type: str
) -> None:
    spec = parse_job(job(rollout={"num_frames": frames}))
    params = {"score": "soft"}
    assert (
        await refusals(spec, {service: RewardPart(params=params)}, api.services.directory, api.services.sources) == []
    )
    (asked,) = services[service].asked
    (sample,) = asked.samples
    assert (dict(asked.params), sample.prompt, sample.media_type) == (params, 'A red sign that says "K7QX"', media_type)
    assert decode_media(sample.media, media_type).shape == (frames, 64, 64, 3)


async def test_who_scores_groups_is_tried_on_one(api: Api, job: MakeJob, services: dict[str, Service]) -> None:
    services["v2"].answer.needs_group = True
    assert await refusals(parse_job(job()), {"v2": RewardPart()}, api.services.directory, api.services.sources) == []
    (asked,) = services["v2"].asked
    assert len(asked.samples) == parse_job(job()).rollout.group_size
    assert len({sample.group_id for sample in asked.samples}) == 1
    assert len({sample.media for sample in asked.samples}) == len(asked.samples)


async def test_params_that_are_refused_are_told_at_submit(api: Api, job: MakeJob) -> None:
    wrong = {"ocr": {"params": {"scroe": "soft"}}, "second": {"service": "videos"}}
    answer = await api.client.post("/v1/jobs", json=job(rewards=wrong))
    assert answer.status_code == 422, answer.text
    assert "rewards.ocr" in answer.text
    assert "params: there is only score" in answer.text
    assert "rewards.second does not score pictures" in answer.text
    away = await api.client.post("/v1/jobs", json=job(rewards={"away": {"params": {"x": "y"}}}))
    assert away.status_code == 202, away.text  # the job waits for it


async def test_a_reward_without_gradient_is_told_before_a_job_trains_on_it(
    api: Api, job: MakeJob, services: dict[str, Service]
) -> None:
    """At submit, and where a change gives it a weight; a reward that only watches, or a shadow, needs none."""
    services["v2"].answer.gives_gradient = True
    algorithm, words = (
        {"name": "srpo"},
        "rewards.ocr: service 'ocr' gives no gradient (a 1), and the job's loss trains on",
    )
    refused = await api.client.post("/v1/jobs", json=job(algorithm=algorithm))
    assert refused.status_code == 422, refused.text
    assert words in refused.text
    assert "use a reward that gives one, and give this one weight 0" in refused.text
    job_id = (await api.submit(job(algorithm=algorithm, rewards={"v2": {}, "ocr": {"weight": 0.0}})))["id"]
    change = await patch(api, job_id, 0, set={"ocr": {"weight": 1.0}})
    assert change.status_code == 422, change.text
    assert words in change.text
    shadow = await patch(api, job_id, 0, shadow={"beside": {"for": "v2", "service": "ocr"}})
    assert shadow.status_code == 202, shadow.text


async def test_a_job_that_has_ended_keeps_its_rewards(api: Api, job: MakeJob) -> None:
    job_id = (await api.submit(job()))["id"]
    await api.client.post(f"/v1/jobs/{job_id}/cancel")
    assert (await patch(api, job_id, 0, set={"ocr": {"weight": 2}})).status_code == 409
    await api.store.jobs.set_status(job_id, "cancelled")
    answer = await patch(api, job_id, 0, set={"ocr": {"weight": 2}})
    assert answer.status_code == 409
    assert "has ended as cancelled" in answer.json()["detail"]


async def test_a_shadows_score_reaches_its_record_beside_other_changes(api: Api, job: MakeJob) -> None:
    job_id = (await api.submit(job()))["id"]
    await api.store.samples.put(job_id, SampleRecord(step=1, group=0, index=2, prompt="p", reward=0.5))
    await api.store.samples.put_shadow(job_id, "train", "a", {(1, 0, 2): 0.25, (1, 0, 3): 1.0})
    await api.store.samples.put_shadow(job_id, "train", "b", {(1, 0, 2): 0.75})
    found = await api.store.samples.get(job_id, 1, 0, 2)
    assert (found.reward, found.shadow) == (0.5, {"a": 0.25, "b": 0.75})
    assert len((await api.store.samples.page(job_id))[0]) == 1


async def test_comparisons_are_computed_when_there_is_something_new(
    api: Api, job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = list[tuple[int, bool]]()

    def watched(groups: Sequence[GroupScores]) -> Comparison:
        computed.append((len(groups), threading.current_thread() is threading.main_thread()))
        return compare(groups)

    monkeypatch.setattr(dependencies, "compare", watched)
    job_id = (await api.submit(job()))["id"]
    found = Comparisons()
    for count in (1, 1, 2):
        rows = [GroupScores(step=count, group=0, active=[0.0, 1.0], shadow=[0.1, 0.2])]
        if count > len(await api.store.shadows.scores(job_id, "pair", "train")):
            await api.store.shadows.add(job_id, "pair", "train", rows)
        assert (await found.of(api.store, job_id, "pair", "train")).groups == count
    assert computed == [(1, False), (2, False)]


async def test_a_shadow_that_comes_back_keeps_what_it_gave(api: Api, job: MakeJob) -> None:
    job_id = (await api.submit(job()))["id"]
    rows = [GroupScores(step=0, group=0, active=[0.0], shadow=[0.1])]
    redis = api.services.redis
    names = [keys.shadow(job_id, "pair", part) for part in ("train", "counts")]
    for _ in range(2):
        await api.store.shadows.add(job_id, "pair", "train", rows)
        await api.store.shadows.count(job_id, "pair", {"scored": 1})
        assert [await redis.ttl(name) for name in names] == [-1, -1]
        await api.store.shadows.expire(job_id, "pair")
        assert all([0 < await redis.ttl(name) <= SHADOW_TTL_S for name in names])


async def test_a_job_has_so_many_revisions_and_so_large_params(
    api: Api, job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = (await api.submit(job()))["id"]
    long = await patch(api, job_id, 0, set={"ocr": {"params": {"score": "é" * 32768}}})
    assert long.status_code == 422
    assert "at most 65536" in long.text
    monkeypatch.setattr(api_rewards, "MAX_REVISIONS", 1)
    assert (await patch(api, job_id, 0, set={"ocr": {"weight": 2}})).status_code == 202
    one_more = await patch(api, job_id, 1, set={"ocr": {"weight": 3}})
    assert one_more.status_code == 422
    assert "at most 1 revisions" in one_more.text
