"""Names of all Redis keys of the project. `ff:<job>:…` belongs to one job, `ff-fleet:…` to the whole fleet.

The two prefixes differ, so that no job id can collide with a key of the fleet.
"""

import hashlib
import re
from collections.abc import Callable
from functools import partial

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


def fleet_key(*parts: str | int) -> str:
    """Key `ff-fleet:<part>:…`, which belongs to no job."""
    return ":".join(["ff-fleet", *(_checked(part) for part in parts)])


def _checked(part: str | int) -> str:
    text = str(part)
    if not _PART.fullmatch(text):
        raise ValueError(f"{text!r} cannot be part of a Redis key: use letters, digits, '.', '_' and '-' only")
    return text


def _of_job(*parts: str) -> Callable[[str], str]:
    return lambda job_id: job_key(job_id, *parts)


# -- keys of one job, by its id ------------------------------------------------------------------------------------

trajectories = _of_job("trajectories")
"""Stream of finished samples (protobuf, references only)."""
dead_trajectories = _of_job("trajectories", "dead")
"""Stream of entries that could not be handled, each with its reason."""
held_steps = _of_job("held")
"""Set of the steps whose samples or request are stored."""
strikes = _of_job("strikes")
"""Sorted set of a job's strikes in their order; it expires an hour after the last one."""
job = _of_job("record")
"""Hash: spec, status, progress, results."""
events = _of_job("events")
"""Stream of a job's events, as users see them."""
events_once = _of_job("events", "once")
"""Names of the events that may happen only once and did."""
metrics_steps = _of_job("metrics", "steps")
"""Index of the steps that have metrics."""
checkpoints = _of_job("checkpoints")
"""Hash: step → checkpoint."""
validations = _of_job("validations")
"""Hash: version → its validation."""
adapter = _of_job("adapter")
"""Where replicas get the newest adapter of a job that shares them (protobuf)."""
rewards = _of_job("rewards")
"""Hash: number → revision of the job's rewards that took effect."""


def sample_refs(job_id: str, step: int) -> str:
    """Hash of a step's samples (protobuf, references only): `<group>/<index>` → sample."""
    return job_key(job_id, "refs", step)


def train_request(job_id: str, step: int) -> str:
    """The stored request of a training step."""
    return job_key(job_id, "train", step)


def blob(job_id: str, *parts: str | int) -> str:
    """Key of a blob, e.g. `blob(job, "trajectory", step, group, index)`."""
    return job_key(job_id, "blob", *parts)


def metrics(job_id: str, step: int) -> str:
    """Hash: metric name → value, of one step."""
    return job_key(job_id, "metrics", step)


def samples(job_id: str, purpose: str, part: str) -> str:
    """Samples of one purpose that people can look at; `part` is "records", "order" (by step) or "rewards"."""
    return job_key(job_id, "samples", purpose, part)


def pictures(job_id: str, *part: str) -> str:
    """Set of the training samples whose pictures stay after their step; "ended" is the step up to which that is
    decided (pictures.py)."""
    return job_key(job_id, "pictures", *part)


def shadow(job_id: str, pair: str, part: str) -> str:
    """Scores that a shadow and its reward gave the same groups; `part` is "train", "validate" or "counts"."""
    return job_key(job_id, "shadow", pair, part)


def vote_groups(job_id: str, state: str) -> str:
    """Hash: `<step>/<group>` → a group that people vote on; `state` is "waiting" or "complete"."""
    return job_key(job_id, "votes", state)


def votes(job_id: str, step: int, group: int) -> str:
    """List of the votes on a group."""
    return job_key(job_id, "votes", step, group)


# -- keys of the fleet ---------------------------------------------------------------------------------------------

leader = partial(fleet_key, "leader")
"""Lease of the controller that runs jobs."""
leader_term = partial(fleet_key, "leader", "term")
"""Fencing token: the controller that took the lease last, even if it no longer holds it."""
acknowledged = partial(fleet_key, "acknowledged")
"""A number that the leader raises, to find out which writes its replicas have (replication.py)."""
driving = partial(fleet_key, "driving")
"""Hash: job → suspicion against it, as JSON, while it may bring the controller down (quarantine.py)."""
demand = partial(fleet_key, "demand")
"""Hash: "component/name" → replicas wanted, as JSON."""
notices = partial(fleet_key, "notices")
"""Stream of ids of jobs that changed, for watchers."""
reward_load = partial(fleet_key, "rewards", "load")
"""Calls of the rewards, as the leader saw them last."""
changes = partial(fleet_key, "changes")
"""Pub/sub channel by which controllers ask each other to look again: at jobs, or at demand."""
jobs = partial(fleet_key, "jobs")
"""Index of all jobs."""
leftovers = partial(fleet_key, "jobs", "leftovers")
"""Sorted set: ended and deleted jobs whose keys the leader still has to clear, by when it does."""
retention = partial(fleet_key, "jobs", "held")
"""Why the limits of ended jobs remove nothing; it expires unless renewed."""
removed = partial(fleet_key, "jobs", "removed")
"""Hash: removed job → seconds that controllers have seen its folder without it."""


def replicas(part: str, *of: str) -> str:
    """The rollout replicas; `part` is "records", "renewed", "changed", "revision" or, of a replica, "owner"
    (replicas.py)."""
    return fleet_key("replicas", part, *of)


def model_holders(path: str) -> str:
    """List of the processes that have a model's files or take them, oldest first; hashed, since paths have slashes."""
    return fleet_key("models", hashlib.sha256(path.encode()).hexdigest())


def session(digest: str) -> str:
    """A browser's session, by the SHA-256 of its token."""
    return fleet_key("sessions", digest)


def logins(digest: str) -> str:
    """Names of a key's newest sessions, by the key's SHA-256."""
    return fleet_key("logins", digest)


def jobs_with_status(status: str) -> str:
    """Index of the jobs of one status."""
    return fleet_key("jobs", status)


def tombstone(job_id: str) -> str:
    """Record of a deleted job, kept while its `Idempotency-Key` lives."""
    return fleet_key("deleted", job_id)


def idempotency(key: str) -> str:
    """Record of one `Idempotency-Key`; hashed, since clients may send any characters."""
    return fleet_key("idempotency", hashlib.sha256(key.encode()).hexdigest())
