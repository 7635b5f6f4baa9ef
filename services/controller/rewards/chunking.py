"""Cuts samples into calls that a reward service takes. Pure."""

import itertools
from collections.abc import Iterator, Sequence

from flowfleet.rewards.requests import EncodedSample
from flowfleet.rpc.endpoint import MAX_MESSAGE_BYTES

MAX_CALL_BYTES = MAX_MESSAGE_BYTES // 2
"""Maximum size of one call's samples: well below the limit of a message."""


def chunks(
    samples: Sequence[EncodedSample], max_samples: int, max_bytes: int = MAX_CALL_BYTES, wished_bytes: int = 0
) -> Iterator[list[EncodedSample]]:
    """Cuts samples, in order, into calls within both limits; a sample over `max_bytes` gets a call of its own. By
    `wished_bytes`, if any, only what leaves two in a call: a service that fails on several, and on all, is broken."""
    call: list[EncodedSample] = []
    size = 0
    for sample in samples:
        added = sample.num_bytes
        limit = wished_bytes if wished_bytes and len(call) > 1 else max_bytes
        if call and (len(call) == max_samples or size + added > min(limit, max_bytes)):
            yield call
            call, size = [], 0
        call.append(sample)
        size += added
    if call:
        yield call


def whole_groups(
    samples: Sequence[EncodedSample], max_samples: int, max_bytes: int = MAX_CALL_BYTES
) -> Iterator[list[EncodedSample]]:
    """Yields one call per group; samples of a group must be adjacent. Raises ValueError for a group beyond a limit."""
    for _, members in itertools.groupby(samples, key=lambda sample: sample.group_id):
        group = list(members)
        size = sum(sample.num_bytes for sample in group)
        if len(group) > max_samples:
            raise ValueError(f"scores whole groups of at most {max_samples} samples: lower rollout.group_size")
        if len(group) > 1 and size > max_bytes:
            raise ValueError(
                f"scores whole groups, and one of {size} bytes is over the {max_bytes} of a call: lower "
                "rollout.group_size or the size of the samples"
            )
        yield group
