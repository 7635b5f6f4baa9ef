"""Files that come with a request, from blobs in Redis to what the engine is given."""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from flowfleet.data.blobs import RedisBlobs
from flowfleet.errors import DataLoss, NotFound
from flowfleet.media.files import Frames, encode_media
from flowfleet.models.settings import Size
from flowfleet.proto import common_pb2, rollout_pb2
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.rollout.engines.base import GenerationRequest, Noise, PromptGroup, Sampling, SequenceSampling
from services.rollout.sampling.media import LIMITS, MediaReader, fit
from tests.flowfleet.media.test_sound import tone

File = tuple[bytes, str]
PNG = "image/png"


def noise(seed: int, height: int = 8, width: int = 12, num_frames: int = 1) -> Frames:
    return np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)


def png(seed: int, height: int = 8, width: int = 12) -> File:
    return encode_media(noise(seed, height, width))


# Shape ----------------------------------------------------------------------------------------------------------------


def test_frames_of_the_right_size_stay_as_they_are() -> None:
    frames = noise(0, num_frames=5)
    assert np.array_equal(fit(frames, Size(8, 12, 5)), frames)


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"), [(10, 30, (0, 10), (5, 25)), (40, 20, (15, 25), (0, 20))]
)
def test_the_center_of_the_wanted_aspect_ratio_is_kept(
    height: int, width: int, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    """Where nothing has to be scaled, cropping alone is exact: 20 × 10 pixels out of a wider and a taller picture."""
    frames = noise(1, height, width)
    assert np.array_equal(fit(frames, Size(10, 20)), frames[:, slice(*rows), slice(*columns)])


def test_resizing_follows_cropping() -> None:
    """A ramp stays a ramp: of 40 columns the middle 24 become 6, centered at 8 + 4 i + 1.5."""
    frames = np.broadcast_to((6 * np.arange(40)).astype(np.uint8)[:, None], (1, 24, 40, 3))
    expected = 6 * (8 + 4 * np.arange(6) + 1.5)
    assert np.abs(fit(frames, Size(6, 6)).astype(float) - expected[:, None]).max() <= 0.5


@pytest.mark.parametrize(("count", "wanted", "places"), [(9, 5, (0, 2, 4, 6, 8)), (7, 1, (0,)), (6, 3, (0, 2, 5))])
def test_frames_are_taken_evenly_from_the_first_to_the_last(count: int, wanted: int, places: Sequence[int]) -> None:
    """The middle of 6 frames, at 2.5, is rounded to the even one."""
    frames = noise(3, num_frames=count)
    assert np.array_equal(fit(frames, Size(8, 12, wanted)), frames[list(places)])


def test_too_few_frames_are_refused() -> None:
    with pytest.raises(ValueError, match="its 4 frames are fewer than"):
        fit(noise(4, num_frames=4), Size(8, 12, 5))


# Blobs ----------------------------------------------------------------------------------------------------------------


async def read(
    redis_url: str,
    images: Sequence[File] = (),
    media: Sequence[File] = (),
    *,
    size: Size = Size(8, 12),
    lose: bool = False,
    sequence: SequenceSampling | None = None,
) -> PromptGroup:
    """The only group of a request that brings these files; its media are for the indices 5, 4, 3, …"""
    async with connect(redis_url) as client:
        blobs = RedisBlobs(client)

        async def put(name: str, files: Sequence[File]) -> list[common_pb2.Media]:
            refs = [await blobs.put(keys.blob("job", name, i), data) for i, (data, _) in enumerate(files)]
            return [common_pb2.Media(blob=ref, media_type=kind) for ref, (_, kind) in zip(refs, files, strict=True)]

        indices = [5 - place for place in range(len(media) or 1)]
        group = rollout_pb2.PromptGroup(
            group=2, indices=indices, images=await put("image", images), media=await put("media", media)
        )
        wanted = PromptGroup(2, "", tuple(sorted(indices)), tuple(sorted(indices)))
        request = GenerationRequest((wanted,), Sampling(size, 2), Noise(), "final", sequence=sequence)
        if lose:
            await client.flushall()
        with ThreadPoolExecutor(2) as pool:
            wire = rollout_pb2.GenerateRequest(groups=[group])
            (found,) = (await MediaReader(blobs, pool).read(wire, request)).groups
            return found


async def test_a_question_has_its_media_decoded_in_their_order(redis_url: str) -> None:
    files = [png(0), (tone(16_000), "audio/wav"), encode_media(noise(1, 8, 12, 6), fps=4.0)]
    found = (await read(redis_url, images=files, sequence=SequenceSampling(8))).inputs
    assert [(one.kind, one.content.shape, one.rate) for one in found] == [
        ("picture", (8, 12, 3), 0.0),
        ("sound", (8000,), 0.0),
        ("film", (6, 8, 12, 3), 4.0),
    ]
    assert np.array_equal(found[0].content, noise(0)[0])
    with pytest.raises(DataLoss, match="not a whole audio/wav"):
        await read(redis_url, images=[(b"no sound", "audio/wav")], sequence=SequenceSampling(8))


async def test_media_follow_the_indices_and_images_their_own_order(redis_url: str) -> None:
    group = await read(redis_url, images=[png(0), png(1, 30, 20)], media=[png(2), png(3), png(4)])
    assert group.indices == (3, 4, 5)
    for found, seed in zip(group.media, (4, 3, 2), strict=True):
        assert np.array_equal(found, noise(seed))
    assert [image.mode for image in group.images] == ["RGB", "RGB"]
    for image, original in zip(group.images, (noise(0), noise(1, 30, 20)), strict=True):
        assert np.array_equal(np.asarray(image), original[0])


async def test_every_declared_type_is_read(redis_url: str) -> None:
    smooth = np.broadcast_to(np.linspace(0, 255, 32, dtype=np.uint8)[None, :, None], (32, 32, 3))
    for media_type, kind in (("image/png", "PNG"), ("image/jpeg", "JPEG"), ("image/webp", "WEBP")):
        out = io.BytesIO()
        Image.fromarray(smooth).save(out, kind)
        group = await read(redis_url, [(out.getvalue(), media_type)], [(out.getvalue(), media_type)], size=Size(32, 32))
        assert np.abs(np.asarray(group.images[0]).astype(int) - smooth).mean() < 3
        assert np.array_equal(group.media[0][0], np.asarray(group.images[0]))
    video = encode_media(np.broadcast_to(smooth, (9, 32, 32, 3)))
    (frames,) = (await read(redis_url, media=[video], size=Size(16, 16, 5))).media
    assert frames.shape == (5, 16, 16, 3)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ((png(0)[0], "image/jpeg"), "not a whole image/jpeg"),
        ((png(0)[0][:-40], PNG), "not a whole image/png"),
        ((b"GIF89a", "image/gif"), "media_type 'image/gif' is not read here"),
        ((b"", PNG), "not a whole image/png"),
        ((b"\0" * 100, ""), "media_type ''"),
        (encode_media(noise(0, 16, 16, 3)), "condition images must be pictures"),
    ],
)
async def test_what_is_no_picture_is_refused_by_name(redis_url: str, image: File, message: str) -> None:
    with pytest.raises(DataLoss, match=message) as caught:
        await read(redis_url, images=[png(0), image])
    assert str(caught.value).startswith("group 2: redis:")
    assert "image:1" in str(caught.value)


async def test_a_video_that_is_too_short_is_no_fault_of_the_request(redis_url: str) -> None:
    with pytest.raises(DataLoss, match=r"group 2: redis:.* its 3 frames are fewer than"):
        await read(redis_url, media=[encode_media(noise(0, 16, 16, 3))], size=Size(16, 16, 5))


async def test_a_large_blob_is_refused_unread_and_a_lost_one_is_not_found(redis_url: str) -> None:
    with pytest.raises(NotFound):
        await read(redis_url, images=[png(0)], lose=True)
    blob = common_pb2.BlobRef(uri="redis:nothing", size_bytes=LIMITS.max_bytes + 1)
    group = rollout_pb2.PromptGroup(group=2, indices=[0], images=[common_pb2.Media(blob=blob, media_type=PNG)])
    request = GenerationRequest((PromptGroup(2, "", (0,), (0,)),), Sampling(Size(8, 12), 2), Noise(), "final")

    async def scenario() -> None:
        async with connect(redis_url) as client:
            with ThreadPoolExecutor(1) as pool:
                reader = MediaReader(RedisBlobs(client), pool)
                await reader.read(rollout_pb2.GenerateRequest(groups=[group]), request)

    with pytest.raises(DataLoss, match="bytes are more than"):
        await scenario()
