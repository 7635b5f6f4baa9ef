"""Cuts samples into calls that a reward service takes. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from flowfleet.proto import reward_pb2
from flowfleet.reward_requests import size_of
from flowfleet.rpc import MAX_MESSAGE_BYTES

MAX_CALL_BYTES = MAX_MESSAGE_BYTES // 2
"""Of the samples of one call: well below what a message may have."""


def chunks(
    samples: Sequence[reward_pb2.RewardSample], max_samples: int, max_bytes: int = MAX_CALL_BYTES
) -> Iterator[list[reward_pb2.RewardSample]]:
    """Cuts samples, in order, into calls within both limits; a sample over `max_bytes` gets a call of its own."""
    call: list[reward_pb2.RewardSample] = []
    size = 0
    for sample in samples:
        added = size_of(sample)
        if call and (len(call) == max_samples or size + added > max_bytes):
            yield call
            call, size = [], 0
        call.append(sample)
        size += added
    if call:
        yield call


def whole_groups(
    samples: Sequence[reward_pb2.RewardSample], max_samples: int, max_bytes: int = MAX_CALL_BYTES
) -> Iterator[list[reward_pb2.RewardSample]]:
    """One call a group; the samples of a group stand together. Raises ValueError for a group beyond a limit."""
    for _, members in itertools.groupby(samples, key=lambda sample: sample.group_id):
        group = list(members)
        size = sum(map(size_of, group))
        if len(group) > max_samples:
            raise ValueError(f"scores whole groups of at most {max_samples} samples: lower rollout.group_size")
        if len(group) > 1 and size > max_bytes:
            raise ValueError(
                f"scores whole groups, and one of {size} bytes is over the {max_bytes} of a call: lower "
                "rollout.group_size or the size of the samples"
            )
        yield group
