"""Names of all Redis keys of the project. `ff:<job>:…` belongs to one job, `ff-fleet:…` to the whole fleet.

The two prefixes differ, so that no job id can collide with a key of the fleet.
"""

from __future__ import annotations

import hashlib
import re

_PART = re.compile(r"[A-Za-z0-9._-]+")
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_job_id(job_id: str) -> str:
    """The id itself, fit for keys and folders. Raises ValueError if it is not."""
    if not _JOB_ID.fullmatch(job_id):
        raise ValueError(f"job_id {job_id[:200]!r}: give 1 to 128 letters, digits, dots, dashes or underscores")
    return job_id


def job_key(job_id: str, *parts: str | int) -> str:
    """`ff:<job>:<part>:…`. ValueError when the job id or a part has other characters than letters, digits and `._-`."""
    return ":".join(["ff", *(_checked(part) for part in (job_id, *parts))])


def trajectories(job_id: str) -> str:
    """Stream of finished samples (protobuf, references only)."""
    return job_key(job_id, "trajectories")


def dead_trajectories(job_id: str) -> str:
    """Stream of entries that could not be handled, each with its reason."""
    return job_key(job_id, "trajectories", "dead")


def sample_refs(job_id: str, step: int) -> str:
    """Hash of a step's samples (protobuf, references only): `<group>/<index>` → sample."""
    return job_key(job_id, "refs", step)


def train_request(job_id: str, step: int) -> str:
    """The stored request of a training step."""
    return job_key(job_id, "train", step)


def held_steps(job_id: str) -> str:
    """Set of the steps that have either."""
    return job_key(job_id, "held")


def blob(job_id: str, *parts: str | int) -> str:
    """Key of a blob, e.g. `blob(job, "trajectory", step, group, index)`."""
    return job_key(job_id, "blob", *parts)


def fleet_key(*parts: str | int) -> str:
    """Key `ff-fleet:<part>:…`, which belongs to no job."""
    return ":".join(["ff-fleet", *(_checked(part) for part in parts)])


def replicas(part: str, *of: str) -> str:
    """The rollout replicas; `part` is "records", "renewed", "changed", "revision" or, of a replica, "owner"
    (replicas.py)."""
    return fleet_key("replicas", part, *of)


def leader() -> str:
    """Lease of the controller that runs jobs."""
    return fleet_key("leader")


def leader_term() -> str:
    """Fencing token: the controller that took the lease last, even if it no longer holds it."""
    return fleet_key("leader", "term")


def acknowledged() -> str:
    """A number that the leader raises, to find out which writes its replicas have (replication.py)."""
    return fleet_key("acknowledged")


def driving() -> str:
    """Hash: job → suspicion against it, as JSON, while it may bring the controller down (quarantine.py)."""
    return fleet_key("driving")


def strikes(job_id: str) -> str:
    """Sorted set of a job's strikes in their order; it expires an hour after the last one."""
    return job_key(job_id, "strikes")


def demand() -> str:
    """Hash: "component/name" → replicas wanted, as JSON."""
    return fleet_key("demand")


def notices() -> str:
    """Stream of ids of jobs that changed, for watchers."""
    return fleet_key("notices")


def reward_load() -> str:
    """Calls of the rewards, as the leader saw them last."""
    return fleet_key("rewards", "load")


def session(digest: str) -> str:
    """A browser's session, by the SHA-256 of its token."""
    return fleet_key("sessions", digest)


def logins(digest: str) -> str:
    """Names of a key's newest sessions, by the key's SHA-256."""
    return fleet_key("logins", digest)


def changes() -> str:
    """Pub/sub channel by which controllers ask each other to look again: at jobs, or at demand."""
    return fleet_key("changes")


def jobs() -> str:
    """Index of all jobs."""
    return fleet_key("jobs")


def jobs_with_status(status: str) -> str:
    """Index of the jobs of one status."""
    return fleet_key("jobs", status)


def job(job_id: str) -> str:
    """Hash: spec, status, progress, results."""
    return job_key(job_id, "record")


def events(job_id: str) -> str:
    """Stream of a job's events, as users see them."""
    return job_key(job_id, "events")


def events_once(job_id: str) -> str:
    """Names of the events that may happen only once and did."""
    return job_key(job_id, "events", "once")


def metrics(job_id: str, step: int) -> str:
    """Hash: metric name → value, of one step."""
    return job_key(job_id, "metrics", step)


def metrics_steps(job_id: str) -> str:
    """Index of the steps that have metrics."""
    return job_key(job_id, "metrics", "steps")


def checkpoints(job_id: str) -> str:
    """Hash: step → checkpoint."""
    return job_key(job_id, "checkpoints")


def validations(job_id: str) -> str:
    """Hash: version → its validation."""
    return job_key(job_id, "validations")


def samples(job_id: str, purpose: str, part: str) -> str:
    """Samples of one purpose that people can look at; `part` is "records", "order" (by step) or "rewards"."""
    return job_key(job_id, "samples", purpose, part)


def pictures(job_id: str, *part: str) -> str:
    """Set of the training samples whose pictures stay after their step; "ended" is the step up to which that is
    decided (pictures.py)."""
    return job_key(job_id, "pictures", *part)


def rewards(job_id: str) -> str:
    """Hash: number → revision of the job's rewards that took effect."""
    return job_key(job_id, "rewards")


def shadow(job_id: str, pair: str, part: str) -> str:
    """Scores that a shadow and its reward gave the same groups; `part` is "train", "validate" or "counts"."""
    return job_key(job_id, "shadow", pair, part)


def vote_groups(job_id: str, state: str) -> str:
    """Hash: `<step>/<group>` → a group that people vote on; `state` is "waiting" or "complete"."""
    return job_key(job_id, "votes", state)


def votes(job_id: str, step: int, group: int) -> str:
    """List of the votes on a group."""
    return job_key(job_id, "votes", step, group)


def tombstone(job_id: str) -> str:
    """Record of a deleted job, kept while its `Idempotency-Key` lives."""
    return fleet_key("deleted", job_id)


def leftovers() -> str:
    """Sorted set: ended and deleted jobs whose keys the leader still has to clear, by when it does."""
    return fleet_key("jobs", "leftovers")


def retention() -> str:
    """Why the limits of ended jobs remove nothing; it expires unless renewed."""
    return fleet_key("jobs", "held")


def removed() -> str:
    """Hash: removed job → seconds that controllers have seen its folder without it."""
    return fleet_key("jobs", "removed")


def idempotency(key: str) -> str:
    """Record of one `Idempotency-Key`; hashed, since clients may send any characters."""
    return fleet_key("idempotency", hashlib.sha256(key.encode()).hexdigest())


def _checked(part: str | int) -> str:
    text = str(part)
    if not _PART.fullmatch(text):
        raise ValueError(f"{text!r} cannot be part of a Redis key: use letters, digits, '.', '_' and '-' only")
    return text
