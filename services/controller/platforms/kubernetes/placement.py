"""When a trainer's pods count as placed, and when they have waited too long for a place. Pure.

A gang whose pods cannot all be placed holds nodes that others could use, so it goes after `placement-s` seconds. They
count from the Job's start, and again from each scale-up that the cluster autoscaler begins for one of its pods. Kueue
admits all pods or none, so there is no limit under Kueue, nor while anything else holds the Job or its pods back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from services.controller.platforms.kubernetes import pods
from services.controller.platforms.kubernetes.api import Object
from services.controller.platforms.kubernetes.template import DEFAULT_PLACEMENT_S, PLACEMENT_S, QUEUE

SCALE_UPS = "involvedObject.kind=Pod,reason=TriggeredScaleUp"
"""Selects the autoscaler's events among all."""


def is_placed(attempt: Object, own: Collection[Object]) -> bool:
    """True if each pod of the attempt has a node."""
    placed = [pod for pod in own if pod.get("spec", {}).get("nodeName") and not pods.terminating(pod)]
    return len(placed) >= int(attempt["spec"]["completions"])


def limit_s(attempt: Object) -> float:
    """Seconds in which the attempt must be placed; 0: no limit."""
    annotations = attempt["metadata"].get("annotations") or {}
    is_admitted_elsewhere = queue_of(attempt) or is_suspended(attempt)
    return 0.0 if is_admitted_elsewhere else float(annotations.get(PLACEMENT_S, DEFAULT_PLACEMENT_S))


def waits_from(attempt: Object) -> str:
    """When the attempt began to wait for its place."""
    return str(attempt.get("status", {}).get("startTime") or attempt["metadata"]["creationTimestamp"])


def last_scale_up(events: Iterable[Object], own: Iterable[Object]) -> str:
    """When the autoscaler last began to make nodes for one of these pods; "" if it did not."""
    names = {pod["metadata"]["name"] for pod in own}
    return max((_time(event) for event in events if event["involvedObject"]["name"] in names), default="")


def queue_of(attempt: Object) -> str:
    """Kueue's queue that the attempt waits in, or waited in; "" without Kueue."""
    return str((attempt["metadata"].get("labels") or {}).get(QUEUE, ""))


def is_suspended(attempt: Object) -> bool:
    """Its pods are not created yet, or were deleted for another Job's sake."""
    return bool(attempt["spec"].get("suspend"))


def waits_in_queue(attempt: Object, workloads: Iterable[Object]) -> str:
    """Why a suspended attempt does not run, with Kueue's own words about its Workload."""
    if not (queue := queue_of(attempt)):
        return "its Job is suspended"
    conditions = [pods.condition(workload, kind) for workload in workloads for kind in ("QuotaReserved", "Admitted")]
    words = [found["message"] for found in conditions if found.get("status") == "False" and found.get("message")]
    return ": ".join([f"waits in queue {queue}", *words[:1]])


def _time(event: Object) -> str:
    series = (event.get("series") or {}).get("lastObservedTime")
    return str(series or event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])
