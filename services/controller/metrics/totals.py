"""Totals of fleet and jobs over time: pure, fed with a look at both every few seconds.

Any number of jobs run in a pool. An ended one stays for two minutes, so that Prometheus reads its end however soon the
next begins, and for as long as no job runs in its pool. Counters of samples are the job's own, durable ones; counters
of seconds start at 0 with the controller that counts them. A pool without a job is forgotten an hour after its last
replica left, because rollouts choose its name.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flowfleet.api.fleet import Health
from services.controller.fleet.replicas import Replica, num_devices
from services.controller.job.machine.state import Status
from services.controller.job.machine.state_machine import Machine
from services.controller.metrics.families import Sample

MAX_LAG = 3
"""Versions behind from which on replicas are counted together."""
LAST_S = 120.0
"""Seconds for which an ended job stays."""
FORGET_S = 3600.0
"""Seconds after which a pool without replicas and jobs is forgotten."""


@dataclass
class JobTotals:
    """Totals of one job."""

    job_id: str
    machine: Machine
    active: bool = True
    seen: tuple[float, ...] = ()
    progress_at: float = 0.0
    ran_at: float = 0.0
    """When it was last seen running."""
    accelerator_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counted: dict[str, float] = field(default_factory=dict)
    """Seconds that `new_seconds` has returned so far."""
    opened: dict[int, float] = field(default_factory=dict)
    """Step whose samples are kept → when it was opened, Unix seconds."""

    @property
    def pool(self) -> str:
        return self.machine.spec.rollout.pool

    @property
    def takes_turns(self) -> bool:
        """False for a paused job: the replicas that still serve it are for others."""
        return self.active and self.machine.state.status is not Status.PAUSED

    def look(self, machine: Machine, replicas: Sequence[Replica], at: float, elapsed_s: float) -> None:
        """`replicas`: of its pools."""
        self.machine, self.active, self.ran_at = machine, not machine.finished, at
        if (seen := _progress(machine)) != self.seen:
            self.seen, self.progress_at = seen, at
        if machine.state.trainer_version is not None:
            self.accelerator_s["trainer"] += machine.spec.trainer.world_size * elapsed_s
        rollouts = (r for r in replicas if (r.job_id, r.pool) == (self.job_id, machine.spec.rollout.pool))
        self.accelerator_s["rollout"] += num_devices(rollouts) * elapsed_s
        for step, batch in machine.state.batches.items():
            self.opened.setdefault(step, batch.opened_at)

    def new_seconds(self) -> dict[str, float]:
        """Seconds of accelerators by component since the last call."""
        new = {name: seconds - self.counted.get(name, 0.0) for name, seconds in self.accelerator_s.items()}
        self.counted = dict(self.accelerator_s)
        return {name: seconds for name, seconds in new.items() if seconds}

    def release_before(self, step: int) -> None:
        """Forgets the steps before, which every kept checkpoint covers."""
        self.opened = {held: opened_at for held, opened_at in self.opened.items() if held >= step}


class Totals:
    """Totals of all pools and their jobs."""

    def __init__(self) -> None:
        self._members: defaultdict[str, list[Replica]] = defaultdict(list)
        """Replicas, by pool."""
        self._jobs: dict[str, JobTotals] = {}
        """Totals by job."""
        self._busy_s: defaultdict[str, float] = defaultdict(float)
        self._live_s: defaultdict[str, float] = defaultdict(float)
        self._empty_s: defaultdict[str, float] = defaultdict(float)
        """Seconds since a pool's last replica left."""
        self._at = 0.0

    @property
    def jobs(self) -> set[str]:
        """Jobs that run, or have ended a while ago."""
        return set(self._jobs)

    @property
    def active(self) -> list[str]:
        """Jobs that run."""
        return sorted(job.job_id for job in self._jobs.values() if job.active)

    def look(self, machines: Mapping[str, Machine], replicas: Sequence[Replica], at: float, elapsed_s: float) -> None:
        """Takes in the running jobs and the fleet as they are at a Unix time, `elapsed_s` after the last look."""
        self._members, self._at = defaultdict(list), at
        for replica in replicas:
            self._members[replica.pool].append(replica)
            self._live_s[replica.pool] += elapsed_s if replica.live else 0.0
            self._busy_s[replica.pool] += elapsed_s if replica.live and replica.outstanding else 0.0
        for job in self._jobs.values():
            job.active = job.active and job.job_id in machines
        for job_id, machine in machines.items():
            self._jobs.setdefault(job_id, JobTotals(job_id, machine)).look(machine, self._of(machine), at, elapsed_s)
        used = {machine.spec.rollout.pool for machine in machines.values()}
        for job in [job for job in self._jobs.values() if job.pool in used and at - job.ran_at >= LAST_S]:
            del self._jobs[job.job_id]
        self._forget_pools(elapsed_s)

    def release_before(self, job_id: str, step: int) -> None:
        if job_id in self._jobs:
            self._jobs[job_id].release_before(step)

    def new_seconds(self) -> dict[str, dict[str, float]]:
        """Job → component → seconds of accelerators since the last call."""
        return {job.job_id: new for job in self._jobs.values() if (new := job.new_seconds())}

    def samples(self) -> Iterator[Sample]:
        yield from self._fleet()
        for _, job in sorted(self._jobs.items()):
            yield from self._counters(job)
            if job.active:
                yield from self._versions(job.pool, job)
                yield from self._gauges(job)

    def _forget_pools(self, elapsed_s: float) -> None:
        for pool in self._live_s.keys() - self._wanted():
            self._empty_s[pool] = 0.0 if pool in self._members else self._empty_s[pool] + elapsed_s
            if self._empty_s[pool] >= FORGET_S:
                for seconds in (self._live_s, self._busy_s, self._empty_s):
                    seconds.pop(pool, None)

    def _wanted(self) -> set[str]:
        """Pools of the jobs whose totals are kept."""
        jobs = self._jobs.values()
        return {*(job.pool for job in jobs), *(pool for job in jobs for pool in job.machine.spec.pools)}

    def _fleet(self) -> Iterator[Sample]:
        for pool in sorted({*self._members, *self._live_s, *self._wanted()}):
            members = self._members.get(pool, ())
            healths = Counter(replica.health for replica in members)
            for health in Health:
                yield Sample("flowfleet_fleet_replicas", (pool, str(health)), healths[health])
            outstanding = sum(replica.outstanding for replica in members)
            yield Sample("flowfleet_fleet_outstanding_samples", (pool,), outstanding)
            yield Sample("flowfleet_fleet_busy_seconds_total", (pool,), self._busy_s[pool])
            yield Sample("flowfleet_fleet_replica_seconds_total", (pool,), self._live_s[pool])

    def _of(self, machine: Machine) -> list[Replica]:
        """Replicas that sample for a job."""
        return [replica for pool in machine.spec.pools for replica in self._members.get(pool, ())]

    def _versions(self, pool: str, job: JobTotals) -> Iterator[Sample]:
        published, evaluated = job.machine.state.published, job.machine.state.evaluated
        others = {one.job_id for one in self._jobs.values() if one.takes_turns} - {job.job_id}
        live = [r for r in self._of(job.machine) if r.live and r.job_id not in others]  # it is their turn
        lags = Counter(_lag(replica, job.job_id, published) for replica in live)
        for lag in (*map(str, range(MAX_LAG)), f"{MAX_LAG}+", "none"):
            yield Sample("flowfleet_fleet_replicas_at_version", (pool, job.job_id, lag), lags[lag])
        settled = [replica for replica in live if replica.health in (Health.IDLE, Health.SERVING)]
        behind = [r for r in settled if not r.serves(job.job_id, published, published, evaluated=evaluated)]
        number = len(behind) if published >= 0 else 0
        yield Sample("flowfleet_fleet_replicas_behind", (pool, job.job_id), number)

    def _counters(self, job: JobTotals) -> Iterator[Sample]:
        state = job.machine.state
        yield Sample("flowfleet_job_samples_trained_total", (job.job_id,), state.samples_trained)
        for reason, number in sorted(state.samples_dropped.items()):
            yield Sample("flowfleet_job_samples_dropped_total", (job.job_id, reason), number)
        for component in ("rollout", "trainer"):
            seconds = job.accelerator_s[component]
            yield Sample("flowfleet_job_accelerator_seconds_total", (job.job_id, component), seconds)

    def _gauges(self, job: JobTotals) -> Iterator[Sample]:
        job_id, spec, state = job.job_id, job.machine.spec, job.machine.state
        yield Sample("flowfleet_job_status", (job_id, str(state.status)), 1)
        yield Sample("flowfleet_job_step", (job_id,), state.version)
        yield Sample("flowfleet_job_steps", (job_id,), job.machine.steps)
        yield Sample("flowfleet_job_last_progress_timestamp_seconds", (job_id,), job.progress_at)
        yield Sample("flowfleet_job_waiting_samples", (job_id, spec.pools[0]), self._waiting(job))
        yield Sample("flowfleet_job_staleness_limit", (job_id,), spec.schedule.max_staleness)
        if spec.rollout.max_log_prob_gap is not None:
            yield Sample("flowfleet_job_log_prob_gap_limit", (job_id,), spec.rollout.max_log_prob_gap)
        yield Sample("flowfleet_job_held_steps", (job_id,), len(job.opened))
        age = max(0.0, self._at - min(job.opened.values(), default=self._at))
        yield Sample("flowfleet_job_oldest_held_step_age_seconds", (job_id,), age)

    def _waiting(self, job: JobTotals) -> int:
        """Samples wanted by steps that may be sampled now, less what the job's replicas were asked for."""
        machine = job.machine
        if not machine.commands(most=1):
            return 0
        earliest = machine.state.published + machine.spec.schedule.max_staleness
        open_now = (batch for batch in machine.state.batches.values() if batch.step <= earliest)
        asked = sum(replica.outstanding for replica in self._of(machine) if replica.job_id == job.job_id)
        return max(0, sum(batch.count("wanted") for batch in open_now) - asked)


def _progress(machine: Machine) -> tuple[float, ...]:
    """Changes with everything that brings a job forward."""
    state = machine.state
    counts = [batch.count(status) for batch in state.batches.values() for status in ("sampled", "scored")]
    dropped = sum(state.samples_dropped.values())
    return (
        state.version,
        state.published,
        state.checkpointed,
        state.validated,
        float(state.exported),
        dropped,
        *counts,
    )


def _lag(replica: Replica, job_id: str, published: int) -> str:
    if replica.job_id != job_id or replica.version is None:
        return "none"
    lag = max(0, published - replica.version)
    return str(lag) if lag < MAX_LAG else f"{MAX_LAG}+"
