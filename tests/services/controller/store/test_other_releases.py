"""Records that another release wrote: they are listed with a reason, and stop no other job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from flowfleet.api.answers import read
from flowfleet.api.fleet import RewardLoad
from flowfleet.api.jobs import Checkpoint, Desired, Job, JobStatus
from flowfleet.api.rewards import RewardRevision
from flowfleet.api.votes import Asked, Ballot, VoteSample
from flowfleet.errors import OtherFormat
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.redis import keys
from services.controller.limits import Limits
from services.controller.rewards.comparison import GroupScores
from services.controller.store.records import (
    FORMAT,
    UNREADABLE,
    SampleRecord,
    Validation,
    from_epoch,
    is_upgraded,
    spec_digest,
)
from tests.services.controller.conftest import Api

MakeJob = Callable[..., dict[str, Any]]
OTHER = "of-tomorrow"


def enums(model: type[BaseModel], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Settings of a model that have a closed set of words."""
    for name, field in model.model_fields.items():
        words = [word for part in (field.annotation, *get_args(field.annotation)) for word in get_args(part)]
        parts = [field.annotation, *get_args(field.annotation)]
        for part in parts:
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from enums(part, (*place, name))
        if words and all(isinstance(word, str) for word in words):
            yield *place, name


def part_of(spec: Any, place: tuple[str, ...]) -> Any:
    """The part that holds a setting; None where the job has no such part."""
    for name in place[:-1]:
        spec = spec.get(name) if isinstance(spec, dict) else None
    return spec


def changed(spec: dict[str, Any], place: tuple[str, ...], value: Any) -> str:
    data = json.loads(json.dumps(spec))
    part_of(data, place)[place[-1]] = value
    return json.dumps(data)


PLAIN = {"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}}
DUMPED = parse_job(PLAIN).model_dump(mode="json")
ENUMS = [place for place in sorted(set(enums(JobSpec))) if place[-1] in (part_of(DUMPED, place) or {})]
ENUMS.append(("rewards", "ocr", "on_failure"))


@pytest.fixture
async def stored(api: Api, job: MakeJob) -> tuple[str, dict[str, Any]]:
    """A queued job, and its spec as it is stored."""
    record = await api.submit(job(name="theirs"))
    return record["id"], record["spec"]


async def write(api: Api, job_id: str, **fields: str) -> None:
    await api.store.link.redis.hset(keys.job(job_id), mapping=fields)


async def listed(api: Api, path: str = "/v1/jobs") -> dict[str, dict[str, Any]]:
    response = await api.client.get(path)
    assert response.status_code == 200, response.text
    return {row["id"]: row for row in response.json()["items"]}


FIELDS = {
    "a field": {"field_of_tomorrow": "1"},
    "progress": {"progress.phase_of_tomorrow": '"dream"'},
    "rewards": {"rewards.active": json.dumps({"number": 1, "rewards": {"ocr": {}}, "of_tomorrow": 1})},
    "curve": {"curve": json.dumps({"stride": 1, "values": [0.5], "of_tomorrow": 1})},
    "brief": {"brief": json.dumps({"pool": "default", "algorithm": "a", "model": "m", "of_tomorrow": 1})},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
async def test_unknown_fields_change_nothing(api: Api, stored: tuple[str, Any], fields: dict[str, str]) -> None:
    await write(api, stored[0], **fields)
    for path in ("/v1/jobs", "/v1/overview"):
        row = (await listed(api, path))[stored[0]]
        assert (row["status"], UNREADABLE in row["reason"]) == ("queued", False)
    assert (await api.store.jobs.get(stored[0])).job_spec().name == "theirs"


UNREADABLE_FIELDS = {
    "format": {"format": str(FORMAT + 1)},
    "no number": {"format": "v3"},
    "status": {"status": OTHER},
    "desired": {"desired": OTHER},
    "progress": {"progress.step": '"many"'},
    "rewards": {"rewards.active": "{}"},
    "results": {"results": "[1]"},
    "text": {"spec": "no JSON"},
    "time": {"created_at": "yesterday"},
}


@pytest.mark.parametrize("fields", UNREADABLE_FIELDS.values(), ids=UNREADABLE_FIELDS)
async def test_an_unreadable_record_is_shown_and_stops_nothing(
    api: Api, job: MakeJob, stored: tuple[str, Any], fields: dict[str, str]
) -> None:
    await write(api, stored[0], **fields)
    shown = (await api.client.get(f"/v1/jobs/{stored[0]}")).json()
    assert shown["status"] == fields.get("status", "queued")
    assert shown["reason"].startswith(UNREADABLE)
    for path in ("/v1/jobs", "/v1/overview"):
        assert (await listed(api, path))[stored[0]]["status"] == shown["status"]
    with pytest.raises(OtherFormat, match=UNREADABLE):
        (await api.store.jobs.get(stored[0])).job_spec()
    second = await api.submit(job(name="ours"))
    if fields.keys().isdisjoint({"spec", "rewards.active"}):  # of what lists do not read the scheduler says so
        assert (await listed(api, "/v1/overview"))[second["id"]]["place"] == 0
    assert read(Job, shown).status == shown["status"]


@pytest.mark.parametrize("place", ENUMS, ids=".".join)
async def test_a_spec_with_a_word_of_another_release_is_refused_alone(
    api: Api, job: MakeJob, stored: tuple[str, Any], place: tuple[str, ...]
) -> None:
    job_id, spec = stored
    await write(api, job_id, spec=changed(spec, place, OTHER))
    with pytest.raises(OtherFormat, match=UNREADABLE):
        (await api.store.jobs.get(job_id)).job_spec()
    assert (await listed(api))[job_id]["status"] == "queued"
    await api.submit(job(name="ours"))
    extended = await api.client.post(f"/v1/jobs/{job_id}/extend", params={"steps": 10})
    assert (extended.status_code, UNREADABLE in extended.json()["detail"]) == (501, True)
    assert (await api.client.post(f"/v1/jobs/{job_id}/cancel")).status_code == 202


async def test_limits_pass_over_what_cannot_be_read(api: Api, stored: tuple[str, dict[str, Any]]) -> None:
    job_id, spec = stored
    asked = parse_job(spec)
    limits = Limits(open_samples=asked.samples_per_step, ranks=1)
    await write(api, job_id, spec=changed(spec, ("rollout", "pool"), "other"))
    with pytest.raises(Exception, match="samples open"):
        limits.check_room(asked, await api.store.jobs.unended())
    for fields in ({"spec": changed(spec, ("rollout",), {})}, {"spec": json.dumps(spec), "format": "9"}):
        await write(api, job_id, **fields)
        limits.check_room(asked, await api.store.jobs.unended())


def test_values_of_other_releases_are_kept_by_the_client() -> None:
    for kind in (JobStatus, Desired):
        other = kind(OTHER)
        assert (other, other.value, other.known, other in list(kind)) == (OTHER, OTHER, False, False)
        assert all(value.known for value in kind)
    assert not JobStatus(OTHER).terminal


async def test_a_status_that_no_release_has_is_no_filter(api: Api) -> None:
    for path in ("/v1/jobs", "/v1/overview"):
        assert (await api.client.get(path, params={"status": OTHER})).status_code == 422


async def test_a_key_stays_valid_across_an_upgrade(api: Api, job: MakeJob) -> None:
    """Its digest is of the settings of that release: the stored job tells whether it is the same."""
    headers = {"idempotency-key": "k"}
    first = await api.submit(job(), **headers)
    key = keys.idempotency("k")
    earlier = json.dumps({"job": first["id"], "digest": "of another release"})
    await api.store.link.redis.set(key, earlier)
    assert (await api.client.post("/v1/jobs", json=job(), headers=headers)).status_code == 409
    await api.store.link.redis.hdel(keys.job(first["id"]), "format")
    assert (await api.submit(job(), **headers))["id"] == first["id"]
    assert (await api.client.post("/v1/jobs", json=job(seed=7), headers=headers)).status_code == 409


def test_a_model_at_its_commit_is_the_one_that_was_asked_for() -> None:
    asked = parse_job({**PLAIN, "model": {"path": "Org/Tiny"}})
    stored = parse_job({**PLAIN, "model": {"path": "Org/Tiny@abc"}}).model_dump(mode="json")
    assert spec_digest(parse_job(stored)) != spec_digest(asked)
    assert is_upgraded(asked, stored, 1)
    assert not is_upgraded(asked, stored, FORMAT)
    assert not is_upgraded(parse_job({**PLAIN, "model": {"path": "Org/Tin"}}), stored, 1)


async def test_warnings_are_stored_at_submit(api: Api, job: MakeJob) -> None:
    record = await api.submit(job(trainer={"updates_per_step": 1}))
    assert ["algorithm.clip_range" in warning for warning in record["warnings"]] == [True]
    assert (await listed(api))[record["id"]]["warnings"] == record["warnings"]


async def fill(api: Api, job_id: str) -> None:
    """Stores a row of each kind."""
    store, now = api.store, from_epoch(await api.store.link.now())
    await store.samples.put(job_id, SampleRecord(step=0, group=0, index=0, prompt="p", reward=0.5, scores={"ocr": 0.5}))
    await store.history.put_metrics(job_id, 0, {"actor/loss": 0.5})
    await store.history.add_checkpoint(job_id, Checkpoint(step=1, path="c", created_at=now))
    await store.history.add_validation(job_id, Validation(version=0, reward=0.5))
    await store.lists.add_point(job_id, 0, 0.5)
    await store.rewards.put_load({"ocr": RewardLoad(in_flight=0, calls=1, failures=0)})
    revision = RewardRevision(number=1, rewards={"ocr": {}}, requested_at=now, from_step=1, applied_at=now)
    await store.rewards.change(job_id, revision)
    async with store.link.redis.pipeline(transaction=True) as pipe:
        await store.rewards.apply(job_id, revision, pipe)
        await pipe.execute()
    await store.rewards.change(job_id, revision.model_copy(update={"number": 2}))
    await store.shadows.add(job_id, "a", "train", [GroupScores(step=0, group=0, active=[0.5], shadow=[0.5])])
    asked = Asked(prompt="p", samples=[VoteSample(index=0), VoteSample(index=1)], wanted=3)
    await store.votes.ask(job_id, 0, 0, asked)
    ballot = Ballot(step=0, group=0, left=0, right=1, choice="tie", id="12345678", voter="ann")
    await store.votes.vote(job_id, ballot)


def of_tomorrow(text: bytes, change: Callable[[dict[str, Any]], dict[str, Any]]) -> bytes:
    """Changes a JSON object; all else stays."""
    try:
        row = json.loads(text)
    except ValueError:
        return text
    return json.dumps(change(row)).encode() if isinstance(row, dict) else text


async def change_rows(api: Api, job_id: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Changes every JSON object that Redis holds of a job, but its spec, and of the rewards' load."""
    redis, count = api.store.link.redis, 0
    names = [name async for name in redis.scan_iter(match=f"ff:{job_id}:*")]
    for name in (*names, keys.reward_load().encode()):
        kind = await redis.type(name)
        if kind == b"hash":
            rows = {field: value for field, value in (await redis.hgetall(name)).items() if field != b"spec"}
            changed = {field: new for field, value in rows.items() if (new := of_tomorrow(value, change)) != value}
            if changed:
                await redis.hset(name, mapping=changed)
            count += len(changed)
        elif kind == b"list":
            for index, value in enumerate(await redis.lrange(name, 0, -1)):
                await redis.lset(name, index, of_tomorrow(value, change))
                count += 1
        elif kind == b"string":
            await redis.set(name, of_tomorrow(await redis.get(name), change))
            count += 1
    return count


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "unknown fields": lambda row: {**row, "of_tomorrow": {"a": 1}},
    "unknown words": lambda row: {name: OTHER if isinstance(value, str) else value for name, value in row.items()},
    "nothing that is known": lambda row: {"of_tomorrow": 1},
    "other types": lambda row: {name: [[]] for name in row},
}


@pytest.mark.parametrize("how", CHANGES)
async def test_rows_of_another_release_break_no_page(api: Api, stored: tuple[str, dict[str, Any]], how: str) -> None:
    """Each page that reads, of a job with a row of each kind."""
    job_id = stored[0]
    await fill(api, job_id)
    counted = await change_rows(api, job_id, CHANGES[how])
    assert counted >= 11
    pages = [
        path
        for path, page in api.app.openapi()["paths"].items()
        if "get" in page and not path.endswith(("stream", "media"))
    ]
    place = {"{job_id}": job_id, "{step}": "0", "{group}": "0", "{index}": "0", "{name}": "a", "{voter}": "ann"}
    answers, broken = {}, set[str]()
    for path in pages:
        url = path
        for name, value in place.items():
            url = url.replace(name, value)
        response = await api.client.get(url)
        answers[path] = response.status_code
        broken |= {path} if response.status_code >= 500 and response.status_code != 501 else set()
    assert broken == set()
    if how == "unknown fields":
        assert 501 not in answers.values()
        assert len((await api.client.get(f"/v1/jobs/{job_id}/samples")).json()["items"]) == 1
        assert len((await api.client.get(f"/v1/jobs/{job_id}/votes")).json()["items"][0]["votes"]) == 1
    rows = ("events", "metrics", "validations", "checkpoints", "samples", "votes", "votes/preferences")
    assert {answers[f"/v1/jobs/{{job_id}}/{name}"] for name in rows} == {200}
    await api.submit({**stored[1], "name": "ours"})
