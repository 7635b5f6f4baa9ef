"""What every reward service written in Python holds calls to, and the number of the contract that it speaks."""

from __future__ import annotations

from typing import Final

from flowfleet.errors import InvalidRequest
from flowfleet.proto import reward_pb2
from flowfleet.proto.reward_pb2 import RewardSample, ScoreRequest

SERVICE_NAME: Final[str] = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
CONTRACT: Final = 1
"""Version of protos/flowfleet/v1/reward.proto that is spoken."""


def size_of(sample: RewardSample) -> int:
    """Bytes of its media and texts: all but a few of its message, of which `ByteSize()` would serialise a copy."""
    texts = (sample.prompt, *sample.metadata.keys(), *sample.metadata.values())
    return len(sample.media) + sum(map(len, texts))


def check_request(request: ScoreRequest, max_batch: int) -> None:
    """InvalidRequest for a request that cannot be answered as a whole."""
    ids = [sample.sample_id for sample in request.samples]
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
