"""Trainers as Indexed Jobs of torchrun pods: one Job is one attempt, and never starts a pod again by itself.

What is there is read from the directory's mirrors, so an attempt of an earlier controller is found like one of this
one. A rank that fails, and a pod that is evicted or deleted, ends the attempt; the state machine wants the next one,
which resumes from the newest checkpoint. The next attempt is created only after the pods of the last are gone, or a
while after their Job was deleted: a lost node does not report when its pods end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flowfleet.errors import Conflict, NotFound, Unavailable
from flowfleet.job.spec import JobSpec
from flowfleet.process.commands import POD_PORT
from flowfleet.process.service import format_address
from flowfleet.rpc.endpoint import open_channel
from flowfleet.rpc.kinds import job_accept, job_secrets, job_token
from services.controller.platforms.kubernetes import placement, pods
from services.controller.platforms.kubernetes.api import (
    DEPLOYMENTS,
    EVENTS,
    JOBS,
    PODS,
    SECRETS,
    WORKLOADS,
    Object,
    Refused,
)
from services.controller.platforms.kubernetes.directory import COMPONENT, INSTANCE, KubernetesDirectory
from services.controller.platforms.kubernetes.template import JOB, attempt_name, load_template
from services.controller.waiting import NoPlace, NotYet, Queued, WaitedInVain

log = logging.getLogger(__name__)

STOP_MARGIN_S = 15.0
"""Time for a pod to disappear, after the grace period in its template."""
GRACE_S = 30.0
"""Where a template says none, as Kubernetes has it."""
REFUSED_S = 3.0
"""From one refused creation to the next."""
MALFORMED = (400, 422)
"""How the API server refuses a Job that will never be one."""
SEEN_TIMEOUT_S = 5.0
"""Time for the mirrors to show what the API server has done."""
HEALTH_DEADLINE_S = 2.0
START_TIMEOUT_S = 600.0
JOB_UID = "kueue.x-k8s.io/job-uid"
NO_PODS_S = 15.0
"""A Job that has no pods after so long was refused them."""


class KubernetesLauncher:
    """`template` is read again for each attempt: an upgrade needs no restart. `owner` is the controller's
    Deployment."""

    def __init__(
        self, directory: KubernetesDirectory, release: str, namespace: str, template: Path, owner: str
    ) -> None:
        self._directory = directory
        self._release = release
        self._namespace = namespace
        self._template = template
        self._owner = owner
        self._pools: dict[str, str] = {}
        """Jobs that may have a trainer → rollout pool."""
        self._given: set[str] = set()
        """Attempts that have their Secret."""
        self._scale_ups: dict[str, str] = {}
        """Attempt → when the autoscaler last began to make nodes for it."""

    async def ensure(self, job_id: str, spec: JobSpec) -> str:
        """Raises NotYet while its pods wait or start or are refused, ValueError for a Job that can never be one,
        RuntimeError for one that failed by itself, Unavailable for one that somebody ended. After both the next call
        begins a new attempt. NoPlace: its pods were not all placed in time, and are gone."""
        attempt = self._newest(job_id)
        if attempt is None:
            attempt = await self._admitted(job_id, spec)
        if placement.is_suspended(attempt):
            raise Queued(f"trainer: {placement.waits_in_queue(attempt, await self._workloads(attempt))}")
        if not self._lives(attempt):
            await self._replace(job_id, attempt)
        await self._give(attempt)
        waits = self._waits(attempt)
        if await self._is_overdue(attempt):
            await self.stop(job_id, at_once=True)
            limit = f"within {placement.limit_s(attempt):.0f} s"
            raise NoPlace(f"{limit}: {waits or 'its pods have no node'}")
        if waits:
            raise NotYet(f"trainer: {waits}")
        if not await self._serves(attempt):
            await self._look_at_start(job_id, attempt)
            raise NotYet("trainer: starting")
        return load_template(self._template).address(attempt["metadata"]["name"], self._namespace)

    async def alive(self, job_id: str) -> bool:
        attempt = self._newest(job_id)
        return attempt is not None and not placement.is_suspended(attempt) and self._lives(attempt)

    def placed(self, job_id: str) -> bool:
        attempt = self._newest(job_id)
        return attempt is not None and placement.is_placed(attempt, self._pods_of(attempt))

    async def termination_message(self, job_id: str) -> str:
        """The termination message of the pod that failed by itself. Waits for the kubelets to tell of one that is gone;
        a trainer that serves leaves none."""
        attempt = self._newest(job_id)
        if attempt is None or placement.is_suspended(attempt) or (self._lives(attempt) and await self._serves(attempt)):
            return ""
        why, own_fault = await self._post_mortem(attempt)
        return why if own_fault else ""

    async def ended(self, job_id: str) -> None:
        """Its Job then stays as Completed, with the logs of its pods, until its time to live is over."""
        timeout_s = max(map(_grace_s, self._attempts(job_id)), default=0.0)
        await self._directory.jobs.until(lambda: not self._attempts(job_id), timeout_s)

    async def stop(self, job_id: str, *, at_once: bool = False) -> None:
        """Returns once its pods are gone, or after a while. Kubelets kill what does not end within its grace period,
        which `at_once` makes the shortest that is not 0: then a pod would be forgotten while it may still run."""
        attempts = self._attempts(job_id)
        timeout_s = max(map(_grace_s, attempts), default=0.0) + STOP_MARGIN_S
        for attempt in attempts:
            if at_once:  # first: kubelets do not hear of a shorter grace period while one runs
                await self._kill(attempt)
            await self._delete(attempt)
            self._scale_ups.pop(attempt["metadata"]["name"], None)
        gone = await self._directory.jobs.until(lambda: not self._attempts(job_id), timeout_s)
        if not gone:
            log.warning("trainer pods still exist after %.0f s", timeout_s, extra={"job": job_id})

    async def keep_only(self, job_ids: Collection[str]) -> None:
        for attempt in list(self._directory.jobs.objects.values()):
            job_id = _job_id(attempt)
            if job_id and job_id not in job_ids and not pods.terminating(attempt) and not _completed(attempt):
                log.warning("deleted the trainer of an ended job", extra={"job": job_id})
                with contextlib.suppress(Unavailable):  # the next controller to lead tries again
                    await self._delete(attempt)

    @property
    def admitted(self) -> Collection[str]:
        return {*self._pools, *map(_job_id, self._directory.jobs.objects.values())}

    async def admit(self, job_id: str, spec: JobSpec) -> str:
        """Only the cluster knows what there is room for: it gets one trainer of each pool at a time. Kueue has its own
        queue."""
        pool = spec.rollout.pool
        others = [known for known, its in self._pools.items() if its == pool and not self.placed(known)]
        newest = {known: self._newest(known) for known in others}
        if other := next((known for known, one in newest.items() if one is None or not placement.queue_of(one)), ""):
            return f"the trainer of job {other}, which is being placed"
        self._pools[job_id] = pool
        return ""

    async def leave(self, job_id: str) -> None:
        self._pools.pop(job_id, None)

    # -- attempts ------------------------------------------------------------------------------------------------

    def _attempts(self, job_id: str) -> list[Object]:
        """Oldest first, those that are being deleted too. Completed ones are history."""
        jobs = self._directory.jobs.objects.values()
        found = [job for job in jobs if _job_id(job) == job_id and not _completed(job)]
        return sorted(found, key=lambda job: str(job["metadata"]["creationTimestamp"]))

    def _newest(self, job_id: str) -> Object | None:
        """None when there is none, or it is being deleted."""
        left = [attempt for attempt in self._attempts(job_id) if not pods.terminating(attempt)]
        return left[-1] if left else None

    def _pods_of(self, attempt: Object) -> list[Object]:
        uid = attempt["metadata"]["uid"]
        found = self._directory.pods_of("trainer", _job_id(attempt))
        return [
            pod for pod in found if any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences", ()))
        ]

    def _lives(self, attempt: Object) -> bool:
        """It runs or may still come to run. Its pods may tell before the Job does."""
        if pods.terminating(attempt) or _ended(attempt):
            return False
        own = self._pods_of(attempt)
        if placement.queue_of(attempt):  # Kueue's preemption leaves pods that end while the Job lives
            own = [pod for pod in own if not pods.terminating(pod)]
        return not any(map(pods.ended, own))

    async def _serves(self, attempt: Object) -> bool:
        left = [pod for pod in self._pods_of(attempt) if not pods.terminating(pod)]
        leader = next((pod for pod in left if pods.index(pod) == "0"), None)
        return leader is not None and await _serves(leader, job_token(_job_id(attempt)))

    async def _post_mortem(self, attempt: Object) -> tuple[str, bool]:
        """Waits for its pods' reasons. Ranks fail within a moment of each other, and the one that failed
        first may be reported last."""
        seen = self._directory.pods.until
        await seen(lambda: any(map(pods.ended, self._pods_of(attempt))), SEEN_TIMEOUT_S)
        await seen(lambda: pods.is_told(self._pods_of(attempt)), SEEN_TIMEOUT_S)
        return pods.post_mortem(self._pods_of(attempt))

    def _waits(self, attempt: Object) -> str:
        """Why it does not start; "" when its pods run or are about to."""
        own = self._pods_of(attempt)
        if shortage := pods.shortage(own):
            return f"{shortage}; {_demand(attempt)}" if any(map(pods.unschedulable, own)) else shortage
        if not own and pods.age_s(attempt["metadata"]["creationTimestamp"]) > NO_PODS_S:
            name = attempt["metadata"]["name"]
            return (
                f"no pod was created: a quota or admission of the namespace refuses them; see the events of Job {name}"
            )
        return ""

    async def _workloads(self, attempt: Object) -> list[Object]:
        """Kueue's Workloads of the attempt; none without Kueue, or without the right to look."""
        try:
            return (await self._directory.api.list(WORKLOADS, f"{JOB_UID}={attempt['metadata']['uid']}"))[0]
        except (NotFound, Refused):
            return []

    async def _is_overdue(self, attempt: Object) -> bool:
        """Its pods cannot all be placed, and have waited for long. Asks for scale-ups only then."""
        limit_s, name, own = placement.limit_s(attempt), attempt["metadata"]["name"], self._pods_of(attempt)
        if not limit_s or placement.is_placed(attempt, own) or any(map(pods.gated, own)):
            return False
        since = self._scale_ups.get(name, placement.waits_from(attempt))
        if pods.age_s(since) <= limit_s:
            return False
        try:
            events, _ = await self._directory.api.list(EVENTS, "", placement.SCALE_UPS)
        except Refused as error:  # by an older Role
            log.warning("could not read scale-ups of the cluster: %s", error, extra={"job": _job_id(attempt)})
            events = []
        since = self._scale_ups[name] = max(since, placement.last_scale_up(events, own))
        return pods.age_s(since) > limit_s

    # -- changes -------------------------------------------------------------------------------------------------

    async def _admitted(self, job_id: str, spec: JobSpec) -> Object:
        """Creates the trainer's Job; waits for what people can grant (rights, a quota, a webhook's consent)."""
        try:
            return await self._create(job_id, spec)
        except (Refused, Unavailable) as error:
            if isinstance(error, Refused) and error.status in MALFORMED:
                raise ValueError(str(error)) from None
            why = str(error)
        await asyncio.sleep(REFUSED_S)
        raise WaitedInVain(f"trainer: {why}")

    async def _create(self, job_id: str, spec: JobSpec) -> Object:
        """Asks the API server first: a mirror may lag behind what another controller did."""
        api, jobs = self._directory.api, self._directory.jobs
        found, _ = await api.list(JOBS, f"{INSTANCE}={self._release},{JOB}={job_id}")
        for attempt in found:
            if not pods.terminating(attempt) and not _completed(attempt):
                jobs.put(attempt)
                return attempt
        await self.stop(job_id)
        template = load_template(self._template)
        body = template.render(
            job_id,
            spec,
            name=attempt_name(self._release, job_id),
            labels={INSTANCE: self._release, COMPONENT: "trainer"},
            owner=await self._owner_reference(),
            env=job_accept(job_id),
            secrets=job_secrets(job_id).keys(),
        )
        made = await api.create(JOBS, body)
        await self._give(made)
        jobs.put(made)
        log.info("trainer created", extra={"job": job_id, "trainer": made["metadata"]["name"]})
        return made

    async def _give(self, attempt: Object) -> None:
        """Makes the Secret that the attempt's pods wait for, which goes with its Job. One that is there stays."""
        name, uid = attempt["metadata"]["name"], attempt["metadata"]["uid"]
        if name not in self._given and (secrets := job_secrets(_job_id(attempt))):
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}
            metadata = {"name": name, "labels": {INSTANCE: self._release}, "ownerReferences": [owner]}
            body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": secrets}
            with contextlib.suppress(Conflict):
                await self._directory.api.create(SECRETS, body)
            self._given.add(name)

    async def _replace(self, job_id: str, attempt: Object) -> None:
        """Deletes an attempt that has ended and says why it did."""
        why, own_fault = await self._post_mortem(attempt)
        log.warning("trainer ended: %s", why, extra={"job": job_id})
        await self.stop(job_id)
        if own_fault:
            raise RuntimeError(f"the trainer ended: {why}")
        raise Unavailable(f"the trainer ended: {why}")

    async def _look_at_start(self, job_id: str, attempt: Object) -> None:
        """Ends an attempt whose ranks are all there and do not come to serve."""
        own = self._pods_of(attempt)
        since = [pods.running_s(pod) for pod in own]
        if len(own) == attempt["spec"]["completions"] and min(since, default=0.0) > START_TIMEOUT_S:
            await self.stop(job_id)
            raise RuntimeError(f"the trainer's pods have run for {START_TIMEOUT_S:.0f} s but rank 0 does not answer")

    async def _delete(self, attempt: Object) -> None:
        with contextlib.suppress(NotFound):
            await self._directory.api.delete(JOBS, attempt["metadata"]["name"])

    async def _kill(self, attempt: Object) -> None:
        for pod in self._pods_of(attempt):
            try:
                await self._directory.api.delete(PODS, pod["metadata"]["name"], grace_s=1)
            except NotFound:
                continue
            except Refused as error:  # by an older Role: they end by their own grace period
                log.warning("could not kill the trainer's pods at once: %s", error, extra={"job": _job_id(attempt)})
                return

    async def _owner_reference(self) -> dict[str, Any]:
        try:
            owner = await self._directory.api.get(DEPLOYMENTS, self._owner)
        except NotFound:
            raise RuntimeError(f"--owner {self._owner}: namespace {self._namespace} has no such Deployment") from None
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "name": self._owner,
            "uid": owner["metadata"]["uid"],
            "blockOwnerDeletion": False,
        }


async def _serves(leader: Object, token: str | None) -> bool:
    """True if the service of rank 0 takes calls. Calls its address: its name may not be known everywhere yet."""
    host = leader.get("status", {}).get("podIP")
    if pods.phase(leader) != "Running" or not host:
        return False
    channel = open_channel(format_address(host, POD_PORT), token=token)
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=HEALTH_DEADLINE_S
        )
    except grpc.aio.AioRpcError:
        return False
    finally:
        await channel.close(None)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _ended(attempt: Object) -> bool:
    """Or is about to: its outcome is certain."""
    kinds = ("Complete", "Failed", "FailureTarget", "SuccessCriteriaMet")
    return any(pods.condition(attempt, kind).get("status") == "True" for kind in kinds)


def _completed(attempt: Object) -> bool:
    return pods.condition(attempt, "Complete").get("status") == "True"


def _demand(attempt: Object) -> str:
    """Describes how many pods the attempt has, and the accelerators that each wants."""
    count = attempt["spec"]["completions"]
    containers = attempt["spec"]["template"]["spec"]["containers"]
    limits = [container.get("resources", {}).get("limits", {}) for container in containers]
    wanted = [f"{amount} {name}" for part in limits for name, amount in part.items() if "/" in name]
    return f"{count} pods" + (f" of {', '.join(wanted)}" if wanted else "")


def _grace_s(attempt: Object) -> float:
    return float(attempt["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", GRACE_S))


def _job_id(item: Object) -> str:
    return str((item["metadata"].get("labels") or {}).get(JOB, ""))
