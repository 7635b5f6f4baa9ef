"""State machine of a replica's weights: which it holds and who may use them. Pure: no tasks, clients or tensors.

    IDLE ──start──► UPDATING ──finish──► SERVING ──start──► UPDATING …
      ▲                 │                   │
      └──── forget ─────┴──── rebind ───────┘

A failed update leaves IDLE: the weights are then unknown, and only a whole, verified update leads back to SERVING.
Draining lies across these states: it rejects work and lets running work finish.

A generation holds a `Ticket` from admission until its samples are published. Weights change only between `touch` and
the next `finish`, never while samples are in flight; `epoch` rises at each `touch`, so a ticket can be checked.

A job that averages its weights has two kinds of one version: those that sample, and those that are evaluated, which
means validated and exported. A replica serves one of them at a time, and rejects requests for the other.

A replica that samples for several jobs is SHARING: its base stays, and adapters come and go in `slots`, each with
tickets of its own. `share` leads there from any state, and an update back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from flowfleet.errors import Conflict, Unavailable
from flowfleet.lru import LruCache
from services.rollout.weights.slots import Key, Slots


class Phase(Enum):
    IDLE = "idle"
    """No verified weights of any job: takes no prompt."""
    UPDATING = "updating"
    """Weights in flight: takes no prompt."""
    SERVING = "serving"
    """Serves one version of one job."""
    SHARING = "sharing"
    """Samples for all jobs whose adapters are in its slots."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to sample under one policy version."""

    job_id: str
    version: int
    epoch: int
    key: Key | None = None
    """Weights in a slot; None where the replica serves one job."""
    slot: int = 0


class WeightState:
    """Phase, binding and version of one replica. Its methods are the events; illegal ones raise Conflict. `on_change`
    is called when the replica says something else of itself."""

    def __init__(self, on_change: Callable[[], None] = lambda: None, slots: int = 0) -> None:
        self._on_change = on_change
        self.slots = Slots(slots)
        self.phase = Phase.IDLE
        self.draining = False
        self.job_id = ""
        """The job bound by `bind`; empty before the first."""
        self.version = 0
        """Served while SERVING, on its way while UPDATING."""
        self.evaluated = False
        """True if `version` is held in its evaluated weights, False if in the weights that sample."""
        self.digest = ""
        """Digest of the verified hashes while SERVING, else empty."""
        self.epoch = 0
        self.in_flight = 0
        """Samples admitted and not finished."""
        self._loaded = False

    @property
    def name(self) -> str:
        """Name of the phase, or "draining"."""
        if self.phase is Phase.SHARING and not self.draining:
            return "serving" if self.held else "idle"
        return "draining" if self.draining else self.phase.value

    @property
    def held(self) -> list[Key]:
        """Returns all weights that are ready; those used last come first."""
        if self.phase is Phase.SHARING:
            return self.slots.ready
        is_serving = self.phase is Phase.SERVING
        return [Key(self.job_id, self.version, self.evaluated, self.digest)] if is_serving else []

    def is_ready(self, key: Key) -> bool:
        """Returns True if samples may begin on these weights now."""
        return key in self.held

    def admit(
        self, job_id: str, version: int, num_samples: int, *, evaluated: bool = False, digest: str = ""
    ) -> Ticket:
        """Takes in samples for the version and weights named; without a digest, for any of that version. Raises
        Conflict if it does not serve them, Unavailable if it is draining."""
        if self.draining:
            raise Unavailable("this replica is draining: call another")
        if self.phase is Phase.SHARING:
            return self._admit_shared(Key(job_id, version, evaluated, digest), num_samples)
        if self.phase is Phase.UPDATING:
            raise Conflict(
                f"weights are being updated to {self._held} of job {self.job_id}: ask again once GetStatus says SERVING"
            )
        if self.phase is Phase.IDLE:
            raise Conflict("this replica has no verified weights: publish to it first")
        if not self.holds(job_id, version, evaluated=evaluated):
            raise Conflict(
                f"this replica serves {self._held} of job {self.job_id}, not {_named(version, evaluated)} of job "
                f"{job_id}: publish that version to it, or ask for the one it serves"
            )
        if digest and digest != self.digest:
            raise Conflict(
                f"this replica serves {self._held} of job {job_id} with digest {self.digest[:12]}, not {digest[:12]}: "
                "publish that version to it"
            )
        self.in_flight += num_samples
        return Ticket(job_id, version, self.epoch)

    def _admit_shared(self, key: Key, num_samples: int) -> Ticket:
        if not self.is_ready(key):
            raise Conflict(
                f"this replica has {len(self.held)} adapters ready, not {_named(key.version, key.evaluated)} of job "
                f"{key.job_id}: send the request with its adapter"
            )
        slot = self.slots.take(key, num_samples)
        self.in_flight += num_samples
        return Ticket(key.job_id, key.version, self.epoch, key, slot)

    def release(self, num_samples: int, ticket: Ticket | None = None) -> None:
        """Admitted samples are finished or dropped."""
        self.in_flight -= num_samples
        assert self.in_flight >= 0
        if ticket is not None and ticket.key is not None:
            self.slots.release(ticket.key, num_samples)

    def is_overtaken(self, ticket: Ticket) -> bool:
        """Returns True if newer weights wait for the ticket's samples, or are ready in another slot."""
        key = ticket.key
        if key is None or self.phase is not Phase.SHARING:
            return self.phase is Phase.UPDATING
        return self.slots.newest(key.job_id, evaluated=key.evaluated) > key.version

    def check(self, ticket: Ticket) -> None:
        """Raises Conflict if weights may have changed since the ticket was given: its samples carry no version."""
        if ticket.epoch != self.epoch:
            raise Conflict(f"weights changed while version {ticket.version} of job {ticket.job_id} was sampled")

    def bind(self, job_id: str) -> None:
        """The replica now belongs to a job: it has the base model, and no verified weights. "" is none."""
        self.job_id, self.version, self.evaluated = job_id, 0, False
        self.forget()

    def share(self) -> None:
        """The base is live, and adapters go into slots from now on."""
        assert not self.in_flight
        self.job_id, self.version, self.evaluated, self.digest = "", 0, False, ""
        self.slots.clear()
        self.phase = Phase.SHARING
        self._on_change()

    def put(self, key: Key, slot: int) -> None:
        """The adapter in that slot was verified: serves it next to the others."""
        self.slots.put(key, slot)
        self.job_id, self.version, self.evaluated, self.digest = key.job_id, key.version, key.evaluated, key.digest
        self._on_change()

    def forget(self) -> None:
        """Stops admission; the live weights are unknown, or about to be."""
        self.phase, self.digest, self._loaded = Phase.IDLE, "", False
        self._on_change()

    def drain(self) -> None:
        """Refuses work from now on."""
        self.draining = True
        self._on_change()

    def touch(self) -> None:
        """Live weights change from now on. Raises Conflict while samples still run on them."""
        if self.in_flight:
            raise Conflict(f"{self.in_flight} samples still run: call StartWeightUpdate, which waits for them")
        self.epoch += 1
        self._loaded = False

    def start(self, job_id: str, version: int, *, evaluated: bool = False) -> None:
        """Stops admission for an update. Starting again, for whichever version, gives the earlier update up."""
        if self.draining:
            raise Unavailable("this replica is draining: publish to another")
        if not self.job_id or job_id != self.job_id:
            bound = f"job {self.job_id}" if self.job_id else "no job"
            raise Conflict(f"this replica is bound to {bound}, not to job {job_id}: call InitWeightTransfer first")
        self.forget()
        self.phase, self.version, self.evaluated = Phase.UPDATING, version, evaluated

    def holds(self, job_id: str, version: int, *, evaluated: bool = False) -> bool:
        """Returns True if the replica serves these weights or is being updated to them."""
        return (job_id, version, evaluated) == (self.job_id, self.version, self.evaluated)

    def require_updating(self, job_id: str, version: int, *, evaluated: bool = False) -> None:
        """Raises Conflict unless this very update is under way."""
        if self.phase is not Phase.UPDATING or not self.holds(job_id, version, evaluated=evaluated):
            now = f"{self.phase.value} {self._held} of job {self.job_id}" if self.job_id else "bound to no job"
            raise Conflict(
                f"no update to {_named(version, evaluated)} of job {job_id} is running, this replica is {now}: call "
                "StartWeightUpdate first"
            )

    def loaded(self) -> None:
        """Notes that the update's weights are all in the live model, still unverified."""
        assert self.phase is Phase.UPDATING
        self._loaded = True

    def require_loaded(self, job_id: str, version: int, *, evaluated: bool = False) -> None:
        """Raises Conflict unless this very update has loaded its weights."""
        self.require_updating(job_id, version, evaluated=evaluated)
        if not self._loaded:
            raise Conflict(f"{self._held} of job {job_id} has not been loaded: call UpdateWeights first")

    def finish(self, digest: str) -> None:
        """The loaded weights were verified: serves them."""
        assert self.phase is Phase.UPDATING
        assert self._loaded
        self.phase, self.digest = Phase.SERVING, digest
        self._on_change()

    @property
    def _held(self) -> str:
        return _named(self.version, self.evaluated)


def _named(version: int, evaluated: bool) -> str:
    return f"version {version}, evaluated weights," if evaluated else f"version {version}"


MAX_JOBS = 64
"""Jobs remembered: a replica serves one after the other."""


class Attempts:
    """The newest trainer of each job that this replica has heard of."""

    def __init__(self) -> None:
        self._newest: LruCache[str, int] = LruCache(MAX_JOBS)

    def admit(self, job_id: str, attempt: int) -> None:
        """Raises Conflict for one that is not the newest. 0 means an unknown number and is admitted."""
        newest = self._newest.get(job_id) or 0
        if 0 < attempt < newest:
            raise Conflict(f"trainer {attempt} of job {job_id} was replaced by trainer {newest}: it must end")
        if attempt > 0:
            self._newest.put(job_id, attempt)
