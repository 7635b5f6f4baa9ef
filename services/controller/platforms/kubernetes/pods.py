"""Why a pod does not run, or how it ended, in words for the user. Pure: reads what the API server says of a pod."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime, timedelta

from services.controller.platforms.kubernetes.api import Object

STUCK = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
"""Reasons to wait that do not pass by themselves. ContainerCreating is none."""
DISRUPTED = frozenset({"Evicted", "NodeAffinity", "NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated"})
"""Reasons of pods that failed through no fault of their own."""
_NOISE = re.compile(r"\s*(no new claims to deallocate,)?\s*preemption:.*", re.S)
"""Matches what the scheduler adds about preemption, which says the same again."""
_WORDS = re.compile(r"rank \d+: ")
"""How a trainer's own message begins (services/trainer/termination.py). Without one, it is its log's end."""
_MAX_MESSAGE = 500


def terminating(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def ready(pod: Object) -> bool:
    return condition(pod, "Ready").get("status") == "True"


def phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def condition(item: Object, kind: str) -> Object:
    """A condition of a pod or Job; empty when it is not there."""
    conditions = item.get("status", {}).get("conditions") or ()
    return next((found for found in conditions if found["type"] == kind), {})


def unschedulable(pod: Object) -> bool:
    """The scheduler has found no node for it."""
    return not terminating(pod) and condition(pod, "PodScheduled").get("reason") == "Unschedulable"


def gated(pod: Object) -> bool:
    """Something else decides when it may be scheduled."""
    return condition(pod, "PodScheduled").get("reason") == "SchedulingGated"


def shortage(pods: Iterable[Object]) -> str:
    """Why some of these pods cannot run: the reason that most of them have; "" when nothing is wrong."""
    every = [pod for pod in pods if not terminating(pod)]
    reasons = Counter(reason for pod in every if (reason := problem(pod)))
    if not reasons:
        return ""
    reason, count = min(reasons.items(), key=lambda item: (-item[1], item[0]))
    return f"{reason} ({count} of {len(every)} pods)" if len(every) > 1 else reason


def problem(pod: Object) -> str:
    """Why a pod that should run does not; "" for one that runs or is on its way."""
    scheduled = condition(pod, "PodScheduled")
    if gated(pod):
        return "its scheduling is held back by a gate"
    if scheduled.get("status") == "False":
        return _tidy(scheduled.get("message") or scheduled.get("reason") or "cannot be placed")
    for status in _containers(pod):
        waiting = (status.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in STUCK:
            return _stuck(status, waiting)
    return ending(pod) if phase(pod) == "Failed" else ""


def ending(pod: Object) -> str:
    """How a pod failed: the pod's own reason, else the first container that ended with another code than 0."""
    status = pod.get("status", {})
    if status.get("reason"):
        return _line(status["reason"], status.get("message"))
    ended = [found for container in _containers(pod) if (found := (container.get("state") or {}).get("terminated"))]
    failed = sorted((end for end in ended if end.get("exitCode")), key=lambda end: str(end.get("finishedAt", "")))
    return _exit(failed[0]) if failed else "it ended"


def exited(pod: Object) -> bool:
    """True if its containers have all ended."""
    states = [container.get("state") or {} for container in pod.get("status", {}).get("containerStatuses") or ()]
    return bool(states) and all("terminated" in state for state in states)


def has_words(pod: Object) -> bool:
    """A rank of it told its own error as it ended."""
    ends = ((container.get("state") or {}).get("terminated") or {} for container in _containers(pod))
    return any(_WORDS.match(end.get("message") or "") for end in ends)


def ended(pod: Object) -> bool:
    """Or is about to."""
    return terminating(pod) or phase(pod) in ("Failed", "Succeeded")


def ended_at(pod: Object) -> str:
    """When its first container ended, else when its deletion was asked for, as RFC 3339, which sorts by time."""
    states = ((container.get("state") or {}).get("terminated") or {} for container in _containers(pod))
    times = [str(state["finishedAt"]) for state in states if state.get("finishedAt")]
    if terminating(pod):
        grace = timedelta(seconds=pod["metadata"].get("deletionGracePeriodSeconds") or 0)
        times.append((_time(pod["metadata"]["deletionTimestamp"]) - grace).strftime("%Y-%m-%dT%H:%M:%SZ"))
    return min(times, default="")


def disrupted(pod: Object) -> bool:
    """It ends because somebody wanted so: evicted, preempted, or its node went away. Deleted is not told so."""
    if condition(pod, "DisruptionTarget").get("status") == "True":
        return True
    return phase(pod) == "Failed" and pod["status"].get("reason") in DISRUPTED


def post_mortem(own: Collection[Object]) -> tuple[str, bool]:
    """Why an attempt of a trainer with these pods ended, and whether by its own fault. When one pod goes the others
    follow, by failing or by being deleted with their Job. The cause is a disruption if there is one, a deletion that
    came first, the pod of the rank that told its own error, or what came first."""
    gone = _gone(own)
    if not gone:
        return "its pods were deleted", False
    first = next(filter(disrupted, gone), gone[0])
    if disrupted(first) or terminating(first):
        return f"pod {index(first)} was evicted or deleted: {ending(first)}", False
    cause = next(filter(has_words, gone), first)
    if has_words(cause) or phase(cause) == "Failed":
        return f"pod {index(cause)}: {ending(cause)}", True
    return f"pod {index(cause)} ended without a failure, as it does when it has heard nothing for long", False


def is_told(own: Collection[Object]) -> bool:
    """True if nothing that these pods may still tell changes their post-mortem, except a disruption."""
    gone = _gone(own)
    if not gone or any(map(has_words, gone)) or disrupted(gone[0]) or terminating(gone[0]):
        return True
    return all(map(exited, own))


def _gone(own: Collection[Object]) -> list[Object]:
    """Pods that have ended, the first one first."""
    return sorted(filter(ended, own), key=lambda pod: (ended_at(pod), terminating(pod)))


def index(pod: Object) -> str:
    """Its place in an Indexed Job."""
    return str((pod["metadata"].get("annotations") or {}).get("batch.kubernetes.io/job-completion-index", ""))


def running_s(pod: Object) -> float:
    """How long all its containers have run; 0 while one does not."""
    containers = pod.get("status", {}).get("containerStatuses") or ()
    started = [((container.get("state") or {}).get("running") or {}).get("startedAt") for container in containers]
    return min(age_s(time) if time else 0.0 for time in started) if started else 0.0


def age_s(timestamp: str) -> float:
    """Seconds since then, by this machine's clock."""
    return (datetime.now(UTC) - _time(timestamp)).total_seconds()


def _time(timestamp: str) -> datetime:
    return datetime.fromisoformat(timestamp)


def _stuck(status: Object, waiting: Object) -> str:
    last = (status.get("lastState") or {}).get("terminated")
    if waiting["reason"] == "CrashLoopBackOff" and last:
        return f"CrashLoopBackOff: container {status['name']}: {_exit(last)}"
    return _line(waiting["reason"], waiting.get("message") or f"container {status['name']}")


def _exit(terminated: Object) -> str:
    """OOMKilled and the like are named; Error says no more than the code."""
    reason = terminated.get("reason") or "Error"
    code = f"exit code {terminated.get('exitCode')}"
    return _line(code if reason in ("Error", "Completed") else f"{reason}, {code}", terminated.get("message"))


def _line(reason: str, message: str | None) -> str:
    return f"{reason}: {_tidy(message)}" if message and message.strip() else reason


def _tidy(message: str) -> str:
    """Returns the message as one line. Keeps the end of a long one, because the end of a log tells more."""
    line = " ".join(_NOISE.sub("", message).split())
    return line if len(line) <= _MAX_MESSAGE else "…" + line[-_MAX_MESSAGE:]


def _containers(pod: Object) -> Iterator[Object]:
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()
