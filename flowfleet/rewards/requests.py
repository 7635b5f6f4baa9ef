"""Requests as rewards and their callers share them: calls in Python, the bounds of scores, the contract's number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import grpc

from flowfleet.errors import InvalidRequest
from flowfleet.proto import reward_pb2
from flowfleet.proto.reward_pb2 import RewardSample, ScoreRequest, ScoreResponse

SERVICE_NAME: Final[str] = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
CONTRACT: Final = 2
"""Newest version of protos/flowfleet/v1/reward.proto that is known: in 2 a score may be pending, and may
come with its gradient."""
MAX_SCORE: Final = 1e100
"""Scores beyond ± this count as not finite: their squares and sums, from which advantages are made, would be."""


def contract_of(*, may_wait: bool, gives_gradient: bool = False) -> int:
    """Version that a service names in Describe; controllers that know neither pending scores nor gradients refuse 2."""
    return CONTRACT if may_wait or gives_gradient else 1


async def no_gradient(context: Any) -> NoReturn:
    """Ends a call of ScoreWithGradient of a service that gives none."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this reward gives no gradient, and Describe says so")
    raise AssertionError("abort raises")


@dataclass(frozen=True, eq=False, slots=True)
class EncodedSample:
    """A sample with its file as it came. A message would copy the file whenever it is looked at."""

    media: bytes
    """Encoded picture or video, or a text in UTF-8."""
    media_type: str
    """"image/png", "image/jpeg", "image/webp", "video/mp4" or "text/plain"."""
    prompt: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of the prompt's line in the data set."""
    group_id: str = ""
    """Id shared by the samples of one prompt, which are compared with one another."""
    sample_id: str = ""

    @classmethod
    def of(cls, message: RewardSample) -> EncodedSample:
        """The same."""
        metadata = dict(message.metadata)
        return cls(message.media, message.media_type, message.prompt, metadata, message.group_id, message.sample_id)

    @property
    def num_bytes(self) -> int:
        """Size of its media and texts: nearly all of its message."""
        return len(self.media) + sum(map(len, (self.prompt, *self.metadata, *self.metadata.values())))


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """Contents of a `ScoreRequest`."""

    samples: Sequence[EncodedSample]
    params: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, data: bytes) -> ScoreCall:
        """Decodes a serialized message."""
        request = ScoreRequest.FromString(data)
        return cls([EncodedSample.of(sample) for sample in request.samples], dict(request.params))

    @property
    def num_bytes(self) -> int:
        """Size of its samples."""
        return sum(sample.num_bytes for sample in self.samples)

    def write(self) -> bytes:
        """The serialized message, with one copy of each file; by way of a message object they would be three. Made of
        parts, since a message is its fields one after the other, in any order
        (protobuf.dev/programming-guides/encoding). ValueError for texts that are not Unicode."""
        parts = [ScoreRequest(params=self.params).SerializeToString()]
        for sample in self.samples:
            texts = RewardSample(
                sample_id=sample.sample_id,
                media_type=sample.media_type,
                prompt=sample.prompt,
                metadata=sample.metadata,
                group_id=sample.group_id,
            ).SerializeToString()
            media = _head(RewardSample.MEDIA_FIELD_NUMBER, len(sample.media))
            size = len(texts) + len(media) + len(sample.media)
            parts += [_head(ScoreRequest.SAMPLES_FIELD_NUMBER, size), texts, media, sample.media]
        return b"".join(parts)


def score_method(channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryMultiCallable[bytes, ScoreResponse]:
    """`Score` of the other end, for serialized calls: gRPC would send a message that it cannot serialize as an empty
    one."""
    return channel.unary_unary(f"/{SERVICE_NAME}/Score", response_deserializer=ScoreResponse.FromString)


def _head(field_number: int, size: int) -> bytes:
    """Returns the bytes before a field of so many bytes: its number and wire type, LEN, and the size, as varints."""
    return _varint(field_number << 3 | 2) + _varint(size)


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; all but the last byte have the eighth set."""
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def check_ids(sample_ids: Iterable[str], max_batch: int) -> None:
    """InvalidRequest for a call of such samples, which cannot be answered as a whole."""
    ids = list(sample_ids)
    if not ids:
        raise InvalidRequest("samples is empty: send at least one")
    if len(ids) > max_batch:
        raise InvalidRequest(
            f"{len(ids)} samples in one call, the limit is {max_batch}: split the call "
            "(Describe gives the limit as max_batch_size)"
        )
    if not all(ids):
        raise InvalidRequest(f"samples[{ids.index('')}].sample_id is empty: scores are matched by it")
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise InvalidRequest(f"sample_id {twice!r} occurs twice in one call: scores are matched by it")
