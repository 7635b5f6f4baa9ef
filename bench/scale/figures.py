"""Figures from what the processes noted. Notes are in seconds, figures in milliseconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

Note = tuple[str, str, int, float]
"""Name, job, step or version, Unix seconds."""


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Returns n, p50, p99 and max of seconds, in milliseconds."""
    ordered = [round(1000 * value, 3) for value in sorted(values)]
    if not ordered:
        return {"n": 0}
    last = len(ordered) - 1
    return {
        "n": len(ordered),
        "p50": ordered[round(0.5 * last)],
        "p99": ordered[round(0.99 * last)],
        "max": ordered[last],
    }


def latencies(notes: Iterable[Note], start: float, end: float, simulated_s: float) -> dict[str, dict[str, float]]:
    """Returns latencies of what happened from `start` to `end`:

    scheduling  from all replicas holding a version (the trainer answers) to each Generate call of that step arriving
    turnaround  from a step's last sample in Redis to its TrainStep arriving: intake, scores, advantages
    publishing  from the earliest end of an update to PublishWeights arriving
    step        from version to version; `overhead` is the part that is not simulated
    """
    at: dict[str, dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for what, job_id, number, when in notes:
        at[what][job_id, number].append(when)
    inside = {key: times[0] for key, times in at["published"].items() if start <= times[0] <= end}
    steps = [
        at["published"][job_id, version + 1][0] - when
        for (job_id, version), when in inside.items()
        if (job_id, version + 1) in at["published"]
    ]
    found = {
        "scheduling": [when - inside[key] for key in inside for when in at["generate"].get(key, [])],
        "turnaround": [
            at["train"][key][0] - max(at["generated"][key])
            for key in inside
            if at["train"].get(key) and at["generated"].get(key)
        ],
        "publishing": [
            at["publish"][job_id, step + 1][0] - at["trained"][job_id, step][0]
            for job_id, step in inside
            if at["publish"].get((job_id, step + 1)) and at["trained"].get((job_id, step))
        ],
        "step": steps,
        "overhead": [seconds - simulated_s for seconds in steps],
    }
    return {name: percentiles(value for value in values if value > -simulated_s) for name, values in found.items()}


def starts(notes: Iterable[Note], submitted: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Times from a job's submission until its trainer is configured, and until its first sample is requested."""
    first: dict[tuple[str, str], float] = {}
    for what, job_id, _, when in notes:
        first[what, job_id] = min(when, first.get((what, job_id), when))
    return {
        what: percentiles(first[what, job_id] - when for job_id, when in submitted.items() if (what, job_id) in first)
        for what in ("configure", "generate")
    }
