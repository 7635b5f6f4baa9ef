"""Media of a data set on their way to the rollouts, through a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flowfleet.data.blobs import BlobStore, RedisBlobs
from flowfleet.errors import DataLoss, NotFound, Unavailable
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import rollout_pb2
from flowfleet.redis.client import connect
from services.controller.prompts import inputs as module
from services.controller.prompts.inputs import Inputs
from services.controller.prompts.sources import Sources
from services.controller.reading.places import Places


@pytest.fixture
async def blobs(redis_url: str) -> AsyncIterator[BlobStore]:
    client = connect(redis_url)
    yield RedisBlobs(client)
    await client.aclose()


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return Sources(Places.of([tmp_path], [], tmp_path / "state"))


def request(*indices: list[int]) -> rollout_pb2.GenerateRequest:
    groups = [rollout_pb2.PromptGroup(group=7 + number, indices=part) for number, part in enumerate(indices)]
    return rollout_pb2.GenerateRequest(step=3, groups=groups)


def file(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


async def test_a_condition_image_is_stored_once_and_again_when_it_is_gone(
    blobs: BlobStore, sources: Sources, tmp_path: Path
) -> None:
    same = Prompt("a", images=(file(tmp_path / "1.png", b"one"), file(tmp_path / "2.jpg", b"one")))
    inputs = Inputs("job", blobs, sources)
    first, second = request([0, 1], [0]), request([2])
    await inputs.attach(first, [same, same])
    media = [medium for group in first.groups for medium in group.images]
    assert [medium.media_type for medium in media] == ["image/png", "image/jpeg"] * 2
    assert len({medium.blob.uri for medium in media}) == 1  # by content
    (tmp_path / "1.png").unlink()  # not read again
    (tmp_path / "2.jpg").unlink()
    await inputs.attach(second, [same])
    assert list(second.groups[0].images) == media[:2]
    await blobs.delete([media[0].blob])
    with pytest.raises(DataLoss, match=r"the data set names .*1\.png, which does not exist"):
        await inputs.attach(request([0]), [same])
    file(tmp_path / "1.png", b"one")
    file(tmp_path / "2.jpg", b"one")
    await inputs.attach(request([0]), [same])
    assert await blobs.get(media[0].blob) == b"one"


async def test_asking_again_prolongs_its_life(
    blobs: BlobStore, sources: Sources, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, client = Inputs("job", blobs, sources), connect(redis_url)
    prompt = Prompt("a", images=(file(tmp_path / "1.png", b"one"),))
    lives = []
    for ttl in (100, 1000):
        monkeypatch.setattr(module, "PICTURE_TTL_S", ttl)
        await inputs.attach(asked := request([0]), [prompt])
        lives.append(await client.ttl(asked.groups[0].images[0].blob.uri.removeprefix("redis:")))
    assert 90 < lives[0] <= 100 < 990 < lives[1] <= 1000
    await client.aclose()


async def test_given_media_follow_the_indices(blobs: BlobStore, sources: Sources, tmp_path: Path) -> None:
    pair = Prompt("a", media=(file(tmp_path / "good.mp4", b"good"), file(tmp_path / "bad.mp4", b"bad")))
    asked = request([1, 0], [1])
    await Inputs("job", blobs, sources).attach(asked, [pair, pair])
    found = [[await blobs.get(medium.blob) for medium in group.media] for group in asked.groups]
    assert found == [[b"bad", b"good"], [b"bad"]]
    assert {medium.media_type for group in asked.groups for medium in group.media} == {"video/mp4"}
    assert not any(group.images for group in asked.groups)


async def test_forgetting_frees_this_jobs_condition_images_alone(
    blobs: BlobStore, sources: Sources, tmp_path: Path
) -> None:
    prompt = Prompt("a", images=(file(tmp_path / "1.png", b"one"),), media=(file(tmp_path / "2.png", b"two"),))
    mine, others = request([0]), request([0])
    await Inputs("job", blobs, sources).attach(mine, [prompt])
    await Inputs("job2", blobs, sources).attach(others, [prompt])
    await Inputs("job", blobs, sources).forget()
    with pytest.raises(NotFound):
        await blobs.get(mine.groups[0].images[0].blob)
    assert await blobs.get(others.groups[0].images[0].blob) == b"one"
    assert await blobs.get(mine.groups[0].media[0].blob) == b"two"  # to look at


async def test_what_cannot_be_read_now_is_asked_for_again_and_what_is_too_large_is_refused(
    blobs: BlobStore, sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = Inputs("job", blobs, sources)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(Unavailable, match=r"folder\.png, which could not be read"):
        await inputs.attach(request([0]), [Prompt("a", images=(str(tmp_path / "folder.png"),))])
    monkeypatch.setattr(module, "MAX_MEDIA_BYTES", 3)
    with pytest.raises(DataLoss, match="larger than 3 bytes"):
        await inputs.attach(request([0]), [Prompt("a", images=(file(tmp_path / "big.png", b"four"),))])
