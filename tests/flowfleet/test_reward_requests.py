from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from flowfleet.reward_requests import EncodedSample, ScoreCall

TEXTS = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3)
SAMPLES = st.builds(
    EncodedSample, st.binary(max_size=64), st.just("image/png"), st.text(max_size=20), TEXTS, st.text(), st.text()
)


@given(st.lists(SAMPLES, max_size=4), TEXTS)
def test_a_call_is_read_as_it_was_written(samples: list[EncodedSample], params: dict[str, str]) -> None:
    message = ScoreCall(samples, params).message()
    call = ScoreCall.read(message.SerializeToString())
    assert [dataclasses.astuple(sample) for sample in call.samples] == [
        dataclasses.astuple(sample) for sample in samples
    ]
    assert call.params == params
    assert [dataclasses.astuple(EncodedSample.of(one)) for one in message.samples] == [
        dataclasses.astuple(sample) for sample in samples
    ]


def test_its_size_is_about_that_of_its_message() -> None:
    samples = [
        EncodedSample(bytes(1000), "image/png", "a sign", {"colour": "red"}, "0/1", f"job/{k}") for k in range(9)
    ]
    call = ScoreCall(samples)
    assert call.num_bytes == 9 * (1000 + len("a sign") + len("colour") + len("red"))
    assert call.num_bytes < call.message().ByteSize() < call.num_bytes + 9 * 60
