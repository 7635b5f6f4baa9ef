"""The rollout replicas as the controller knows them, pure: what they say of themselves in, choices out.

A replica gets a prompt only if it serves a verified, admissible version of the job (promise 4 of
docs/architecture.md). Among those the one with the fewest outstanding samples is chosen, and a request (whole groups)
stays on its replica. Everything is indexed by pool and by job, so a choice costs as much as the job has replicas,
whatever the size of the fleet.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from flowfleet.api.fleet import Health
from flowfleet.data.replicas import ReplicaRecord
from flowfleet.proto import rollout_pb2

MISSED_ASKS = 3

SETTLED = (Health.IDLE, Health.SERVING)

Verified = Callable[[int, str], bool]
"""True if a job published this version's weights with this digest."""


_HEALTH = {
    rollout_pb2.ROLLOUT_STATE_IDLE: Health.IDLE,
    rollout_pb2.ROLLOUT_STATE_SERVING: Health.SERVING,
    rollout_pb2.ROLLOUT_STATE_UPDATING: Health.UPDATING,
    rollout_pb2.ROLLOUT_STATE_DRAINING: Health.DRAINING,
}


@dataclass(frozen=True)
class Offer:
    """Newest adapter of a job, which any replica of its pool that samples for several jobs fetches with a request."""

    pool: str
    version: int
    evaluated: bool
    digest: str
    adapter: rollout_pb2.Adapter


@dataclass(frozen=True)
class Replica:
    """Rollout process. `outstanding` counts samples that this controller requested and has not received yet."""

    replica_id: str
    address: str
    pool: str = "default"
    incarnation: str = ""
    health: Health = Health.UNKNOWN
    job_id: str = ""
    version: int | None = None
    evaluated: bool = False
    """Serves the version's evaluated weights; else those that sample."""
    digest: str = ""
    outstanding: int = 0
    samples_total: int = 0
    device: str = ""
    """Name of its first device, with their number where several share each sample: "cuda:0 ×4"."""
    device_id: str = ""
    """Id of the accelerator, the same in every process; empty on the CPU."""
    num_devices: int = 1
    """Devices that share each sample."""
    missed: int = 0
    """Times in a row that it was asked and did not answer."""
    doubted: bool = False
    """Needs a direct status check: its record is stale or contradicted."""
    slots: int = 0
    """Adapters that it can have ready at once; 0: it serves one job at a time."""
    held: frozenset[str] = frozenset()
    """Jobs whose weights it has ready, where it samples for several."""
    offer: Offer | None = None
    """Adapter that it is lent for."""

    def serves(self, job_id: str, low: int, high: int, *, evaluated: bool = False) -> bool:
        ready = self.health is Health.SERVING and (self.job_id, self.evaluated) == (job_id, evaluated)
        return ready and self.version is not None and low <= self.version <= high

    @property
    def live(self) -> bool:
        return self.health in (Health.IDLE, Health.SERVING, Health.UPDATING)


class Fleet:
    """Replicas by pool and by job. Methods that change replicas add to `touched` the jobs that this may affect."""

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self._by_pool: defaultdict[str, dict[str, Replica]] = defaultdict(dict)
        self._by_job: defaultdict[str, dict[str, Replica]] = defaultdict(dict)
        self._doubted: set[str] = set()
        self.verified: dict[str, Verified] = {}
        """Verified versions by job; without an entry the version's number alone counts."""
        self.updating: Counter[str] = Counter()
        """Jobs whose trainer updates or publishes, how often at once: its ranks get no prompt, where rollouts sample as
        well."""
        self.touched: set[str] = set()
        self.offers: dict[str, Offer] = {}
        """Newest adapters by job, of jobs that share replicas."""
        self._lent: Counter[tuple[str, str]] = Counter()
        """Samples outstanding by replica and job."""

    def __len__(self) -> int:
        return len(self._replicas)

    def update(self, records: Iterable[ReplicaRecord]) -> None:
        """New and changed records. One at another address is another replica."""
        for record in records:
            known = self._replicas.get(record.replica_id)
            if known is None or known.address != record.address:
                known = Replica(record.replica_id, record.address)
            self._put(_with_record(known, record))

    def keep(self, replica_ids: Collection[str]) -> None:
        """Forgets all others."""
        self.forget(self._replicas.keys() - set(replica_ids))

    def forget(self, replica_ids: Iterable[str]) -> None:
        for replica_id in replica_ids:
            if replica_id in self._replicas:
                self._forget(replica_id)

    def mark_suspect(self, replica_ids: Iterable[str]) -> None:
        """Marks replicas for a status check; state is unchanged until it returns."""
        for replica_id in replica_ids:
            known = self._replicas.get(replica_id)
            if known is not None and not known.doubted:
                self._put(replace(known, doubted=True))

    def answered(self, replica_id: str, status: rollout_pb2.RolloutStatus) -> None:
        known = self._replicas.get(replica_id)
        if known is None:
            return
        health = _HEALTH.get(status.state, Health.UNKNOWN)
        told = _told(known, status, health, status.policy_version, status.weights_digest)
        self._put(replace(told, held=frozenset(held.job_id for held in status.held), slots=status.slots))

    def missed(self, replica_id: str, *, lost: bool = False) -> None:
        """It did not answer, or (`lost`) a call broke: no prompt until it answers again."""
        known = self._replicas.get(replica_id)
        if known is not None:
            missed = known.missed + 1
            gone = lost or missed >= MISSED_ASKS
            self._put(replace(known, missed=missed, health=Health.LOST if gone else known.health, doubted=True))

    def charge(self, replica_id: str, samples: int, job_id: str = "") -> None:
        """Adds to what is outstanding, of a job; negative when done."""
        self._lent[replica_id, job_id] += samples
        if self._lent[replica_id, job_id] <= 0:
            del self._lent[replica_id, job_id]
        known = self._replicas.get(replica_id)
        if known is not None:
            self._put(replace(known, outstanding=max(0, known.outstanding + samples)))

    def choose(
        self, job_id: str, low: int, high: int, limit: int, evaluated: bool = False, idle: str = ""
    ) -> Replica | None:
        """The least loaded replica that serves such weights of a version in low … high and has less than `limit`
        samples outstanding; in the pool `idle`, none: what waits there waits for an update."""
        offer = self.offers.get(job_id)
        if offer is not None:
            return (
                self._choose_shared(job_id, offer, limit) if self._fits(job_id, offer, low, high, evaluated) else None
            )
        of_job = self._by_job.get(job_id, {}).values()
        able = [
            r
            for r in of_job
            if r.outstanding < limit
            and self._serves(r, job_id, low, high, evaluated)
            and not (r.pool == idle and (r.outstanding or job_id in self.updating))
        ]
        return min(able, key=lambda r: (r.outstanding, -(r.version or 0), r.replica_id), default=None)

    def _choose_shared(self, job_id: str, offer: Offer, limit: int) -> Replica | None:
        """The least loaded replica, of those that have less than `limit` samples of the job; rather one that has
        weights of the job."""
        of_pool = self._by_pool.get(offer.pool, {}).values()
        able = [r for r in of_pool if r.slots and r.health in SETTLED and self._lent[r.replica_id, job_id] < limit]
        best = min(able, key=lambda r: (r.outstanding, job_id not in r.held, r.replica_id), default=None)
        if best is None:
            return None
        return replace(best, version=offer.version, evaluated=offer.evaluated, digest=offer.digest, offer=offer)

    def _fits(self, job_id: str, offer: Offer, low: int, high: int, evaluated: bool) -> bool:
        verified = self.verified.get(job_id)
        known = verified is None or verified(offer.version, offer.digest)
        return known and low <= offer.version <= high and offer.evaluated == evaluated

    def shares(self, pool: str) -> bool:
        """True if every live replica of a pool samples for several jobs."""
        live = [r for r in self._by_pool.get(pool, {}).values() if r.live]
        return bool(live) and all(r.slots for r in live)

    def behind(self, pool: str, job_id: str, version: int, *, evaluated: bool = False) -> list[Replica]:
        """Live replicas of a pool that settled on something else than these weights of this version of this job."""
        settled = [r for r in self.live(pool) if r.health in SETTLED]
        return [r for r in settled if not self._serves(r, job_id, version, version, evaluated)]

    def num_devices(self, job_id: str, pool: str) -> int:
        """Accelerators that live replicas of a pool that serve a job run on; on CPUs, processes."""
        if job_id in self.offers:
            return num_devices(r for r in self._by_pool.get(pool, {}).values() if job_id in r.held)
        return num_devices(r for r in self._by_job.get(job_id, {}).values() if r.pool == pool)

    def live(self, pool: str) -> list[Replica]:
        """Live replicas of a pool, by name."""
        of_pool = (r for r in self._by_pool.get(pool, {}).values() if r.live)
        return sorted(of_pool, key=lambda r: r.replica_id)

    def num_in(self, pool: str) -> int:
        """Replicas of a pool, live or not."""
        return len(self._by_pool.get(pool, ()))

    def any_live(self, pool: str) -> bool:
        return any(r.live for r in self._by_pool.get(pool, {}).values())

    def doubted(self) -> list[Replica]:
        return [self._replicas[replica_id] for replica_id in self._doubted]

    def get(self, replica_id: str) -> Replica | None:
        return self._replicas.get(replica_id)

    def all(self) -> list[Replica]:
        return sorted(self._replicas.values(), key=lambda r: r.replica_id)

    def _serves(self, replica: Replica, job_id: str, low: int, high: int, evaluated: bool) -> bool:
        """True if it serves such a version in this job's own weights. After Redis lost writes, replicas may still serve
        versions of the same number that the lost steps had made."""
        verified = self.verified.get(job_id)
        known = verified is None or verified(replica.version or 0, replica.digest)
        return known and replica.serves(job_id, low, high, evaluated=evaluated)

    def _put(self, replica: Replica) -> None:
        replica_id = replica.replica_id
        known = self._replicas.get(replica_id)
        if known is not None and (known.pool, known.job_id) != (replica.pool, replica.job_id):
            self._forget(replica_id)
        if known is None or known.health is not replica.health:
            self.touched |= {job_id for job_id, offer in self.offers.items() if offer.pool == replica.pool}
        self._replicas[replica_id] = replica
        self._by_pool[replica.pool][replica_id] = replica
        self._by_job[replica.job_id][replica_id] = replica
        if replica.doubted:
            self._doubted.add(replica_id)
        else:
            self._doubted.discard(replica_id)
        self.touched.add(replica.job_id)

    def _forget(self, replica_id: str) -> None:
        known = self._replicas.pop(replica_id)
        self._doubted.discard(replica_id)
        self.touched.add(known.job_id)
        for index, name in ((self._by_pool, known.pool), (self._by_job, known.job_id)):
            del index[name][replica_id]
            if not index[name]:
                del index[name]


def _with_record(known: Replica, record: ReplicaRecord) -> Replica:
    """Updates a replica from its record, whose health does not count while this process does not answer."""
    if known.missed and known.incarnation == record.incarnation:
        return replace(known, pool=record.pool, samples_total=record.samples_total)
    health = Health(record.state) if record.state in set(Health) else Health.UNKNOWN
    held = (name.partition("/")[0] for name in record.held.split())
    told = _told(known, record, health, record.version, record.digest)
    return replace(told, pool=record.pool, held=frozenset(held), slots=record.slots)


def _told(
    known: Replica, said: ReplicaRecord | rollout_pb2.RolloutStatus, health: Health, version: int | None, digest: str
) -> Replica:
    return replace(
        known,
        incarnation=said.incarnation,
        health=health,
        job_id=said.job_id,
        version=version if health is Health.SERVING else None,
        evaluated=said.evaluated,
        digest=digest,
        samples_total=said.samples_total,
        device=f"{said.device} ×{said.num_devices}" if said.num_devices > 1 else said.device,
        device_id=said.device_id,
        num_devices=max(1, said.num_devices),
        missed=0,
        doubted=False,
    )


def num_devices(replicas: Iterable[Replica]) -> int:
    """Accelerators that the live ones run on; on CPUs, processes."""
    found = dict[str, int]()
    for replica in (replica for replica in replicas if replica.live):
        place = replica.device_id or replica.replica_id
        found[place] = max(found.get(place, 0), replica.num_devices)
    return sum(found.values())
