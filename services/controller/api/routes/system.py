"""REST: the fleet, health, version and metrics of the controller."""

import importlib.metadata
from collections.abc import Mapping

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from redis.exceptions import RedisError

from flowfleet.api.answers import Answer
from flowfleet.api.fleet import Fleet, ReplicaView, RewardLoad, Shortage
from flowfleet.api.overview import Alert
from flowfleet.errors import Unavailable
from flowfleet.filesystem import filesystem_id
from services.controller.api.alerts import alerts_of
from services.controller.api.dependencies import Services, Use
from services.controller.fleet.directory import Directory
from services.controller.fleet.replicas import Replica
from services.controller.ports import Scheduler

router = APIRouter(tags=["system"])


class Condition(Answer):
    status: str


class Version(Answer):
    version: str
    api: str
    filesystem: str
    """Clients that have the same one see the controller's files under the same paths."""


@router.get("/v1/fleet")
async def fleet(use: Use) -> Fleet:
    return await _fleet(use)


@router.get("/v1/alerts")
async def alerts(use: Use) -> list[Alert]:
    """Lists what needs attention now, in words; empty while all is well."""
    return alerts_of((await use.feed.waiting()).values(), await _fleet(use))


async def _fleet(use: Services) -> Fleet:
    known = use.runner.fleet_view()
    newest = await _newest_versions(use, {replica.job_id for replica in known if replica.job_id})
    replicas = [
        ReplicaView.model_validate(replica).model_copy(update={"lag": _lag(replica, newest)}) for replica in known
    ]
    directory = use.directory
    rewards = {name: list(addresses) for name, addresses in sorted(directory.rewards.items())}
    pools = None if directory.pools is None else sorted(directory.pools)
    shortages = _shortages(directory)
    if use.runner.trouble:
        shortages.append(Shortage(component="redis", name="primary", reason=use.runner.trouble))
    if held := await _retention_held(use):
        shortages.append(Shortage(component="retention", name="history", reason=held))
    load = await _reward_load(use)
    return Fleet(replicas=replicas, rewards=rewards, reward_load=load, pools=pools, shortages=shortages)


async def _reward_load(use: Services) -> dict[str, RewardLoad]:
    """Calls of the rewards; empty without Redis."""
    try:
        return await use.store.rewards.load()
    except RedisError:
        return {}


async def _retention_held(use: Services) -> str:
    """Why limits remove no ended job; empty without Redis."""
    try:
        return await use.store.removal.held()
    except RedisError:
        return ""


async def _newest_versions(use: Services, job_ids: set[str]) -> dict[str, int]:
    """Job → its newest version. Empty without Redis: the fleet is shown all the same, with that shortage."""
    try:
        return {row.id: row.progress.policy_version for row in await use.feed.rows(sorted(job_ids))}
    except RedisError:
        return {}


def _lag(replica: Replica, newest: Mapping[str, int]) -> int | None:
    if replica.version is None or replica.job_id not in newest:
        return None
    return max(0, newest[replica.job_id] - replica.version)


def seen_of_fleet(runner: Scheduler, directory: Directory) -> object:
    """Equal as long as `fleet` would answer the same."""
    return tuple(runner.fleet_view()), directory.rewards, _shortages(directory), runner.trouble


def _shortages(directory: Directory) -> list[Shortage]:
    known = [("rollout", name) for name in directory.pools or ()] + [("reward", name) for name in directory.rewards]
    found = ((component, name, directory.shortage(component, name)) for component, name in sorted(known))
    return [Shortage(component=component, name=name, reason=reason) for component, name, reason in found if reason]


@router.get("/v1/version")
async def version() -> Version:
    return Version(version=importlib.metadata.version("flowfleet"), api="v1", filesystem=filesystem_id())


@router.get("/healthz")
async def healthz(use: Use) -> Condition:
    """The process answers, and its runner has not ended by itself; 503 asks for a new start."""
    if not use.closing.is_set():
        _check_runner(use)
    return Condition(status="ok")


@router.get("/readyz")
async def readyz(use: Use) -> Condition:
    """Succeeds while the scheduler runs. A Redis outage does not count: it affects all controllers, and each call
    reports it."""
    _check_runner(use)
    return Condition(status="ok")


def _check_runner(use: Services) -> None:
    if not use.runner.alive:
        raise Unavailable("the scheduler has stopped; restart the controller")


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(use: Use) -> Response:
    """Metrics for Prometheus."""
    return Response(generate_latest(use.registry), media_type=CONTENT_TYPE_LATEST)
