from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.proto.reward_pb2 import RewardSample, ScoreRequest
from flowfleet.rewards.requests import EncodedSample, ScoreCall

TEXTS = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3)
SAMPLES = st.builds(
    EncodedSample, st.binary(max_size=300), st.just("image/png"), st.text(max_size=20), TEXTS, st.text(), st.text()
)


@given(st.lists(SAMPLES, max_size=4), TEXTS)
def test_a_call_is_read_as_it_was_written(samples: list[EncodedSample], params: dict[str, str]) -> None:
    written = ScoreCall(samples, params).write()
    call, message = ScoreCall.read(written), ScoreRequest.FromString(written)
    assert [dataclasses.astuple(sample) for sample in call.samples] == [
        dataclasses.astuple(sample) for sample in samples
    ]
    assert call.params == params
    assert message.params == params
    assert [dataclasses.astuple(EncodedSample.of(one)) for one in message.samples] == [
        dataclasses.astuple(sample) for sample in samples
    ]


@pytest.mark.parametrize("size", [0, 127, 128, 2**14 - 1, 2**14, 2**21 + 1])
def test_files_of_any_size_are_written(size: int) -> None:
    sample = EncodedSample(bytes(size), "image/png", "a sign")
    written = ScoreCall([sample, sample]).write()
    message = ScoreRequest(samples=[RewardSample(media=bytes(size), media_type="image/png", prompt="a sign")] * 2)
    assert ScoreRequest.FromString(written) == message


def test_what_is_not_unicode_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        ScoreCall([EncodedSample(b"", "image/png", "a sign", {"note": "\ud800"})]).write()


def test_its_size_is_about_that_of_its_message() -> None:
    samples = [
        EncodedSample(bytes(1000), "image/png", "a sign", {"colour": "red"}, "0/1", f"job/{k}") for k in range(9)
    ]
    call = ScoreCall(samples)
    assert call.num_bytes == 9 * (1000 + len("a sign") + len("colour") + len("red"))
    assert call.num_bytes < len(call.write()) < call.num_bytes + 9 * 60
