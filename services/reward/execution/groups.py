"""Units of a batch that must stay together: single samples, or whole groups for a scorer that compares them."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from typing import Protocol, TypeVar


class Grouped(Protocol):
    @property
    def group_id(self) -> str: ...


Item = TypeVar("Item", bound=Grouped)
Result = TypeVar("Result")
Alike = TypeVar("Alike")


def units(samples: Sequence[Item], whole_groups: bool) -> list[Sequence[Item]]:
    """Cuts samples, in order, into runs of one group, or into single samples."""
    if not whole_groups:
        return [samples[index : index + 1] for index in range(len(samples))]
    return [list(members) for _, members in itertools.groupby(samples, key=lambda sample: sample.group_id)]


async def by_group(
    samples: Sequence[Item], score: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]]
) -> list[Result]:
    """Scores all groups at once. The results are in the order of the samples."""
    groups: dict[str, list[int]] = {}
    for place, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(place)
    found = await asyncio.gather(*(score([samples[place] for place in places]) for places in groups.values()))
    results = dict(zip(itertools.chain(*groups.values()), itertools.chain(*found), strict=True))
    return [results[place] for place in range(len(samples))]


def alike(items: Sequence[Alike], key: Callable[[Alike], Hashable], most: int) -> Iterator[list[int]]:
    """Places of items with equal keys, at most `most` at a time."""
    places: dict[Hashable, list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault(key(item), []).append(place)
    return (some[start : start + most] for some in places.values() for start in range(0, len(some), most))


def bounds(batch: Sequence[Sequence[object]]) -> Iterator[tuple[int, int]]:
    """First place, and the one behind the last, of each unit."""
    ends = list(itertools.accumulate(len(unit) for unit in batch))
    return zip([0, *ends[:-1]], ends, strict=True)


def together(samples: Sequence[Item]) -> list[int]:
    """The places of samples in an order in which those of a group stand together: groups by their first sample, samples
    of a group as they were."""
    first: dict[str, int] = {}
    for sample in samples:
        first.setdefault(sample.group_id, len(first))
    return sorted(range(len(samples)), key=lambda place: first[samples[place].group_id])
