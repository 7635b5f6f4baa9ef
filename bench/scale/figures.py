"""Figures from what the processes noted. Notes are in seconds, figures in milliseconds."""

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


def latencies(notes: Iterable[Note], start: float, end: float) -> dict[str, dict[str, float]]:
    """Returns latencies of what happened from `start` to `end`:

    scheduling  from all replicas holding a version (the trainer answers) to each Generate call of that step arriving
    turnaround  from a step's last sample in Redis to its TrainStep arriving: intake, scores, advantages
    step        from version to version
    """
    at: dict[str, dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for what, job_id, number, when in notes:
        at[what][job_id, number].append(when)
    published, trained, generated = at["published"], at["train"], at["generated"]
    inside = {key: times[0] for key, times in published.items() if start <= times[0] <= end}
    after = {key: published[key[0], key[1] + 1] for key in inside if (key[0], key[1] + 1) in published}
    found = {
        "scheduling": [when - inside[key] for key in inside for when in at["generate"].get(key, [])],
        "turnaround": [trained[key][0] - max(generated[key]) for key in inside if key in trained and key in generated],
        "step": [times[0] - inside[key] for key, times in after.items()],
    }
    return {name: percentiles(values) for name, values in found.items()}


def starts(notes: Iterable[Note], submitted: Mapping[str, float]) -> dict[str, float]:
    """Returns times from a job's submission until its first sample is requested."""
    first: dict[str, float] = {}
    for what, job_id, _, when in notes:
        if what == "generate":
            first[job_id] = min(when, first.get(job_id, when))
    return percentiles(first[job_id] - when for job_id, when in submitted.items() if job_id in first)
