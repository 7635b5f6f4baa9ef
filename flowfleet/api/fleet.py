"""Replicas, pools and rewards as the REST API shows them."""

from enum import StrEnum

from pydantic import ConfigDict

from flowfleet.api.answers import Answer, FiniteOrNone


class Health(StrEnum):
    """Health of a replica, as the controller sees it."""

    UNKNOWN = "unknown"  # it says nothing that we know
    IDLE = "idle"  # alive without verified weights
    SERVING = "serving"  # takes prompts of its job and version
    UPDATING = "updating"  # weights in flight
    DRAINING = "draining"  # finishes its work and takes no more
    LOST = "lost"  # does not answer


class ReplicaView(Answer):
    """A rollout replica as the controller sees it."""

    model_config = ConfigDict(from_attributes=True)

    replica_id: str
    address: str
    pool: str
    incarnation: str
    """New at every start of the process."""
    health: Health
    job_id: str
    version: int | None
    """Policy version whose weights it verified; null while it serves none."""
    outstanding: int
    """Samples asked for and not finished."""
    samples_total: int
    device: str
    lag: int | None = None
    """Versions of its job that are newer than its own; null while it serves none."""


class Shortage(Answer):
    component: str
    """rollout, reward, redis or retention."""
    name: str
    reason: str


class RewardLoad(Answer):
    """Calls of a reward over the last minutes, as the controller that runs jobs sees them."""

    in_flight: int
    """Calls that wait for an answer now."""
    calls: int
    """Calls that ended."""
    failures: int
    """Calls of them that failed."""
    latency_p50_s: FiniteOrNone = None
    """Median seconds from call to answer."""
    latency_p99_s: FiniteOrNone = None


class Fleet(Answer):
    replicas: list[ReplicaView]
    rewards: dict[str, list[str]]
    """Name → addresses of the replicas that are ready; none while there is no replica."""
    reward_load: dict[str, RewardLoad] = {}
    """Name → its calls; rewards without recent calls are missing."""
    pools: list[str] | None
    """Names of the rollout pools; null if any name is accepted."""
    shortages: list[Shortage]
    """Pools and rewards whose pods cannot run, a Redis that lost writes or takes none, and a
    retention that waits for an operator, each with the reason."""
