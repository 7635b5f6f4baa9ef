"""How much memory what a judge is shown takes while it waits, and while it is decoded."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pybase64
import pytest

from flowfleet.media.files import decode_media, encode_media
from services.reward.judge.media import Picture, Room, pictures_of
from services.reward.judge.messages import chat_request


@contextmanager
def at_most(size_bytes: int) -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= size_bytes
    finally:
        tracemalloc.stop()


async def test_of_a_video_one_frame_at_a_time_is_in_memory() -> None:
    frames = np.stack([np.full((256, 256, 3), 2 * level, np.uint8) for level in range(100)])
    media, media_type = encode_media(frames)
    assert decode_media(media, media_type).nbytes == frames.nbytes  # 20 MB
    with at_most(10 * frames[0].nbytes):
        shown = await pictures_of(media, media_type, 8, Room(2**24))
    assert len(shown) == 8


def test_what_waits_to_be_asked_holds_no_base64() -> None:
    picture = Picture.of(bytes(2**22), "image/png")
    with at_most(2**18):
        request = chat_request("judge", "", [picture, "?"], {})
    assert pybase64.b64encode(picture.data) in request.body


async def test_a_room_holds_so_much_and_lets_in_by_turn() -> None:
    room, inside, order = Room(10), [0], []

    async def enter(number: int, amount: int) -> None:
        async with room.take(amount):
            order.append(number)
            inside[0] += min(amount, 10)
            assert inside[0] <= 10
            await asyncio.sleep(0.001)
            inside[0] -= min(amount, 10)

    await asyncio.gather(*(enter(number, 1 + (7 * number) % 13) for number in range(40)))
    assert order == list(range(40))


async def test_who_is_cancelled_leaves_the_room_to_others() -> None:
    room = Room(1)
    async with room.take(1):
        waiting = asyncio.create_task(room.take(1).__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with asyncio.timeout(10), room.take(1):
        pass
