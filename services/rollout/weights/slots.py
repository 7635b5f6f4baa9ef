"""Slots of a replica that samples for several jobs: which adapters are ready, and who samples with them. Pure.

A version gets a slot of its own and is ready once it is verified; versions that others sample with stay as they are. A
slot is free when no ticket is left; the one that was used longest ago is taken first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Key:
    """Weights of a job: a version, sampling or evaluated, with the digest of its verified hashes."""

    job_id: str
    version: int
    evaluated: bool
    digest: str

    def __str__(self) -> str:
        return f"{self.job_id}/{self.version}{'/evaluated' if self.evaluated else ''}"


@dataclass(eq=False, slots=True)
class Slot:
    number: int
    in_flight: int = 0


class Slots:
    def __init__(self, number: int) -> None:
        self.number = number
        self._free = list(reversed(range(number)))
        self._ready: dict[Key, Slot] = {}
        """Used longest ago first."""

    @property
    def ready(self) -> list[Key]:
        """The weights that are ready; those used last come first."""
        return [*reversed(self._ready)]

    def __contains__(self, key: Key) -> bool:
        return key in self._ready

    def place(self) -> int | None:
        """Number of a slot for new weights, which is the caller's until `put` or `abandon`; None while all are used."""
        if self._free:
            return self._free.pop()
        unused = next((key for key, slot in self._ready.items() if not slot.in_flight), None)
        return None if unused is None else self._ready.pop(unused).number

    def put(self, key: Key, number: int) -> None:
        """The weights in that slot were verified."""
        self._ready[key] = Slot(number)

    def abandon(self, number: int) -> None:
        """The slot holds nothing."""
        self._free.append(number)

    def take(self, key: Key, num_samples: int) -> int:
        """Samples begin on ready weights. Returns the number of their slot."""
        slot = self._ready.pop(key)
        self._ready[key] = slot
        slot.in_flight += num_samples
        return slot.number

    def release(self, key: Key, num_samples: int) -> None:
        self._ready[key].in_flight -= num_samples

    def newest(self, job_id: str, *, evaluated: bool) -> int:
        """Newest version of a job that is ready; -1 for none."""
        versions = (key.version for key in self._ready if (key.job_id, key.evaluated) == (job_id, evaluated))
        return max(versions, default=-1)

    def clear(self) -> None:
        """Forgets all weights; none may be in use."""
        assert not any(slot.in_flight for slot in self._ready.values())
        self.__init__(self.number)  # type: ignore[misc]
