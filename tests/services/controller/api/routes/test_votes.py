"""People's votes through the API, with samples as a running job has them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowfleet.api.votes import MAX_WANTED, Vote, VoteGroup
from flowfleet.proto import common_pb2
from flowfleet.redis import keys
from services.controller.rewards import trials
from services.controller.settings import ControllerSettings
from services.controller.store import votes as store_votes
from services.controller.store.records import SampleRecord
from services.controller.store.sample_refs import SampleRefs
from services.controller.store.votes import MAX_REPEATS
from services.controller.votes import pairing
from services.controller.votes.pairing import is_complete
from tests.services.controller.conftest import Api, serve

MakeJob = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pair comes again, and no submit waits for rewards that do not run."""
    monkeypatch.setattr(pairing, "CHECK_SHARE", 0.0)
    monkeypatch.setattr(trials, "TRIAL_S", 0.05)


async def running(api: Api, job: MakeJob, size: int = 4, groups: int = 1, **parts: Any) -> str:
    """A job with groups of samples in step 3 that have no score."""
    job_id = str((await api.submit(job(**parts)))["id"])
    use, refs = api.services, SampleRefs(api.services.redis, api.services.blobs, job_id)
    samples = []
    for group in range(groups):
        for index in range(size):
            sample = common_pb2.Sample(media_type="image/png")
            sample.id.job_id, sample.id.step, sample.id.group, sample.id.index = job_id, 3, group, index
            media = await use.blobs.put(keys.blob(job_id, "media", 3, group, index), f"picture {index}".encode())
            sample.media.CopyFrom(media)
            samples.append(sample)
    async with use.redis.pipeline(transaction=True) as pipe:
        await refs.put(samples, pipe)
        await pipe.execute()
    return job_id


def asked(size: int = 4, wanted: int = 4) -> dict[str, Any]:
    return {"prompt": "a <b>sign</b>", "samples": [{"index": index} for index in range(size)], "wanted": wanted}


async def ask(api: Api, job_id: str, group: int = 0, **parts: Any) -> VoteGroup:
    answer = await api.client.put(f"/v1/jobs/{job_id}/votes/groups/3/{group}", json={**asked(), **parts})
    assert answer.status_code == 200, answer.text
    return VoteGroup.model_validate(answer.json())


async def next_votes(api: Api, job_id: str, voter: str, count: int = 1) -> dict[str, Any]:
    answer = await api.client.get(f"/v1/jobs/{job_id}/votes/next", params={"voter": voter, "count": count})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def vote(api: Api, job_id: str, voter: str, pair: dict[str, Any], choice: str, **parts: Any) -> Any:
    body = {name: pair[name] for name in ("step", "group")} | {side: pair[side]["index"] for side in ("left", "right")}
    body |= {"choice": choice, "voter": voter, "id": str(uuid.uuid4()), **parts}
    return await api.client.post(f"/v1/jobs/{job_id}/votes", json=body)


async def test_votes_are_asked_for_given_and_complete_their_group(api: Api, job: MakeJob) -> None:
    job_id = await running(api, job)
    assert (await next_votes(api, job_id, "ann")) == {"pairs": [], "waiting": 0, "given": 0}
    assert not (await ask(api, job_id)).complete
    for number in range(4):
        queue = await next_votes(api, job_id, "ann", count=2)
        assert (queue["waiting"], queue["given"]) == (4 - number, number)
        pair = queue["pairs"][0]
        picture = await api.client.get(pair["left"]["media"])
        assert (picture.content, picture.headers["content-type"]) == (
            f"picture {pair['left']['index']}".encode(),
            "image/png",
        )
        better = "left" if pair["left"]["index"] > pair["right"]["index"] else "right"
        answer = await vote(api, job_id, "ann", pair, better)
        assert answer.status_code == 201, answer.text
    found = await ask(api, job_id)  # the reward asks again, perhaps of another controller
    assert found.complete
    assert [one.voter for one in found.votes] == ["ann"] * 4
    assert all(one.better == max(one.pair) for one in found.votes)
    assert (await next_votes(api, job_id, "ann"))["waiting"] == 0

    assert not (await ask(api, job_id, wanted=6)).complete  # the job asks for more
    assert (await next_votes(api, job_id, "ann"))["waiting"] == 2


async def test_a_vote_that_is_sent_again_counts_once(api: Api, job: MakeJob) -> None:
    job_id = await running(api, job)
    await ask(api, job_id)
    (pair,) = (await next_votes(api, job_id, "ann"))["pairs"]
    body = {"id": "11111111-2222"}
    answers = [await vote(api, job_id, "ann", pair, "tie", **body) for _ in range(3)]
    assert len({answer.text for answer in answers}) == 1
    assert len((await ask(api, job_id)).votes) == 1


async def test_votes_at_once_are_all_kept(api: Api, job: MakeJob) -> None:
    job_id = await running(api, job)
    await ask(api, job_id, wanted=12)
    (pair,) = (await next_votes(api, job_id, "ann"))["pairs"]
    answers = await asyncio.gather(*(vote(api, job_id, f"voter-{k}", pair, "left") for k in range(12)))
    assert {answer.status_code for answer in answers} == {201}
    group = await ask(api, job_id, wanted=12)
    assert len({one.voter for one in group.votes}) == 12
    assert not group.complete  # two samples have no vote


async def test_a_voter_repeats_a_pair_only_so_often(api: Api, job: MakeJob) -> None:
    """A key that may vote must not fill Redis, nor make each further vote dear."""
    job_id = await running(api, job)
    await ask(api, job_id, wanted=MAX_WANTED)
    (pair,) = (await next_votes(api, job_id, "ann"))["pairs"]
    codes = [(await vote(api, job_id, "ann", pair, "left")).status_code for _ in range(MAX_REPEATS + 1)]
    assert codes == [201] * MAX_REPEATS + [409]
    assert (await vote(api, job_id, "ben", pair, "left")).status_code == 201
    body = asked(wanted=MAX_WANTED + 1)
    answer = await api.client.put(f"/v1/jobs/{job_id}/votes/groups/3/0", json=body)
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"choice": "both"}, 400, "choice"),
        ({"left": 1, "right": 1}, 404, "samples 1 and 1"),
        ({"left": 0, "right": 9}, 404, "samples 0 and 9"),
        ({"group": 8}, 404, "3/8"),
        ({"voter": "a b"}, 400, "voter"),
        ({"id": "x"}, 400, "id"),
        ({"more": 1}, 400, "more"),
    ],
)
async def test_wrong_votes_are_refused(api: Api, job: MakeJob, change: Any, status: int, words: str) -> None:
    job_id = await running(api, job)
    await ask(api, job_id)
    body = {"step": 3, "group": 0, "left": 0, "right": 1, "choice": "left", "voter": "ann", "id": "12345678"}
    answer = await api.client.post(f"/v1/jobs/{job_id}/votes", json=body | change)
    assert answer.status_code == status
    assert words in answer.json()["detail"]
    assert (await ask(api, job_id)).votes == []


async def test_only_samples_that_wait_can_be_asked_about(api: Api, job: MakeJob) -> None:
    job_id = await running(api, job)
    for place, body in (("3/7", asked()), ("4/0", asked()), ("3/0", asked(size=5))):
        answer = await api.client.put(f"/v1/jobs/{job_id}/votes/groups/{place}", json=body)
        assert answer.status_code == 404, answer.text
        assert "waits for its scores" in answer.json()["detail"]
    twice = asked() | {"samples": [{"index": 0}, {"index": 0}]}
    answer = await api.client.put(f"/v1/jobs/{job_id}/votes/groups/3/0", json=twice)
    assert answer.status_code == 400
    other = await api.client.put(f"/v1/jobs/{uuid.uuid4()}/votes/groups/3/0", json=asked())
    assert other.status_code == 404


async def test_a_group_that_is_asked_for_no_more_is_not_shown(
    api: Api, job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await running(api, job, groups=2)
    await ask(api, job_id, group=0)
    link, now = api.store.link, await api.store.link.now()
    monkeypatch.setattr(api.store.votes, "_link", replace(link, clock=lambda: now - 3600.0))  # an hour ago
    await ask(api, job_id, group=1)
    queue = await next_votes(api, job_id, "ann", count=20)
    assert {pair["group"] for pair in queue["pairs"]} == {0}
    assert queue["waiting"] == 4


async def test_votes_are_exported_as_pages_and_as_preferences(api: Api, job: MakeJob) -> None:
    job_id = await running(api, job, groups=3)
    for group in range(3):
        await ask(api, job_id, group=group)
    given = 0
    while queue := (await next_votes(api, job_id, "ann"))["pairs"]:
        (pair,) = queue
        given += 1
        choice = "tie" if given % 5 == 0 else "left"
        assert (await vote(api, job_id, "ann", pair, choice)).status_code == 201
    first = (await api.client.get(f"/v1/jobs/{job_id}/votes", params={"limit": 2})).json()
    rest = (
        await api.client.get(f"/v1/jobs/{job_id}/votes", params={"limit": 2, "cursor": first["next_cursor"]})
    ).json()
    groups = [VoteGroup.model_validate(item) for item in [*first["items"], *rest["items"]]]
    assert [one.group for one in groups] == [0, 1, 2]
    assert rest["next_cursor"] is None
    votes = [one for group in groups for one in group.votes]
    assert len(votes) == given
    lines = (await api.client.get(f"/v1/jobs/{job_id}/votes/preferences")).text.splitlines()
    rows = [json.loads(line) for line in lines]
    decided = {(one.group, *one.pair) for one in votes if one.better is not None}
    assert len(rows) == len(decided)
    for row in rows:
        better = {one.better for one in votes if (one.group, *one.pair) == (row["group"], *_pair(row))} - {None}
        assert better == {row["chosen"]["index"]}
        assert row["prompt"] == "a <b>sign</b>"
        assert (await api.client.get(row["chosen"]["media"])).status_code == 200


def _pair(row: dict[str, Any]) -> tuple[int, int]:
    low, high = sorted((row["chosen"]["index"], row["rejected"]["index"]))
    return low, high


@pytest.mark.parametrize("guards", ["none", "gate", "weight", "kl"])
async def test_the_report_compares_with_other_rewards_and_warns_without_a_guard(
    api: Api, job: MakeJob, guards: str
) -> None:
    rewards: dict[str, Any] = {"ocr": {"service": "ocr"}}
    gate = {"below": 0.1, "action": "zero"}
    rewards |= {"jpeg": {"gate": {"gate": gate, "weight": 0}, "weight": {}}.get(guards, {"weight": 0})}
    algorithm: dict[str, Any] = {"algorithm": {"kl_coef": 0.01}} if guards == "kl" else {}
    job_id = await running(api, job, rewards=rewards, **algorithm)
    await ask(api, job_id)
    for _ in range(4):
        (pair,) = (await next_votes(api, job_id, "ann"))["pairs"]
        better = "left" if pair["left"]["index"] > pair["right"]["index"] else "right"
        await vote(api, job_id, "ann", pair, better)
    versions = {"ocr": "human 1", "jpeg": "jpeg 2"}
    for index in range(4):
        scores: dict[str, float | None] = {"ocr": float(index), "jpeg": -float(index), "jpeg.detail": 1.0}
        record = SampleRecord(step=3, group=0, index=index, prompt="p", scores=scores, versions=versions)
        await api.store.samples.put(job_id, record)
    found = (await api.client.get(f"/v1/jobs/{job_id}/votes/report")).json()
    assert (found["votes"], found["waiting"], [one["name"] for one in found["voters"]]) == (4, 0, ["ann"])
    assert found["rewards"] == {"jpeg": {"pairs": 4, "agreement": 0.0}}
    assert ["only guard" in one for one in found["warnings"]] == ([True] if guards == "none" else [])


async def test_old_groups_go_with_their_votes(api: Api, job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_votes, "MAX_GROUPS", 3)
    job_id = await running(api, job, groups=5, size=2)
    for group in range(5):
        await ask(api, job_id, group=group, samples=[{"index": 0}, {"index": 1}], wanted=1)
        (pair,) = (await next_votes(api, job_id, "ann"))["pairs"]
        assert (await vote(api, job_id, "ann", pair, "left")).status_code == 201
    kept = await api.store.votes.groups(job_id, None, 10)
    assert [one.group for one in kept] == [2, 3, 4]
    names = [name.decode() async for name in api.services.redis.scan_iter(f"ff:{job_id}:votes:*")]
    assert sorted(names) == [f"ff:{job_id}:votes:3:{group}" for group in (2, 3, 4)] + [f"ff:{job_id}:votes:complete"]


@pytest.fixture
async def guarded(settings: ControllerSettings, tmp_path: Path) -> AsyncIterator[Api]:
    """A controller with a key each for a voter, and for someone who looks."""
    file = tmp_path / "keys.toml"
    file.write_text(
        "".join(
            f'[{name}]\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\nmay = "{may}"\n'
            for name, may in (("ann", "vote"), ("eve", "look"), ("reward", "ask"), ("boss", "steer"))
        )
    )
    async with serve(settings.model_copy(update={"keys_file": file})) as api:
        yield api


async def test_a_voters_key_votes_in_its_own_name_and_steers_nothing(guarded: Api, job: MakeJob) -> None:
    api = guarded
    api.client.headers["x-api-key"] = "boss"
    job_id = await running(api, job)
    api.client.headers["x-api-key"] = "reward"
    await ask(api, job_id)
    api.client.headers["x-api-key"] = "ann"
    other = {"prompt": "another", "samples": [{"index": 0}, {"index": 1}], "wanted": 1}
    for group in (0, 1):  # one that waits for votes, and one that nothing asked for yet
        put = await api.client.put(f"/v1/jobs/{job_id}/votes/groups/3/{group}", json=other)
        assert (put.status_code, "needs a key that may ask" in put.json()["detail"]) == (403, True)
    (pair,) = (await next_votes(api, job_id, "somebody else"[:8]))["pairs"]
    answer = await vote(api, job_id, "bob", pair, "left")
    assert Vote.model_validate(answer.json()).voter == "ann"
    assert (await api.client.post(f"/v1/jobs/{job_id}/cancel")).status_code == 403
    api.client.headers["x-api-key"] = "eve"
    assert (await vote(api, job_id, "eve", pair, "left")).status_code == 403
    assert (await api.client.get(f"/v1/jobs/{job_id}/votes")).status_code == 200


async def test_any_order_of_votes_ends_as_the_whole_list_says(api: Api, job: MakeJob) -> None:
    """The stored mark `complete` is what the votes themselves say."""
    job_id = await running(api, job, size=4)
    await ask(api, job_id, wanted=5)
    draw = random.Random(2)
    for number in range(16):
        left, right = draw.sample(range(4), 2)
        body = {"step": 3, "group": 0, "left": left, "right": right, "choice": "left", "voter": f"v{number % 3}"}
        await api.client.post(f"/v1/jobs/{job_id}/votes", json=body | {"id": f"id-{number:06d}"})
        (found,) = await api.store.votes.groups(job_id, None, 5)
        assert found.complete == is_complete(range(4), found.votes, 5)
    assert found.complete
