"""From what the processes noted to figures. Times are seconds; pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Note = tuple[str, str, int, float]
"""What, job, step or version, Unix seconds."""


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Number, p50, p99, greatest."""
    ordered = sorted(values)
    if not ordered:
        return {"n": 0}
    last = len(ordered) - 1
    return {
        "n": len(ordered),
        "p50": ordered[round(0.5 * last)],
        "p99": ordered[round(0.99 * last)],
        "max": ordered[last],
    }


def first_after(start: float, times: Iterable[float]) -> dict[str, float]:
    """Seconds from a time to the first of those after it."""
    return percentiles([min(found) - start] if (found := [when for when in times if when > start + 0.5]) else [])


def latencies(notes: Iterable[Note], start: float, end: float, simulated_s: float) -> dict[str, dict[str, float]]:
    """Latencies of what happened from `start` to `end`:

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
    """Seconds from a job's submission to its trainer being configured, and to its first sample being asked for."""
    first: dict[tuple[str, str], float] = {}
    for what, job_id, _, when in notes:
        first[what, job_id] = min(when, first.get((what, job_id), when))
    return {
        what: percentiles(first[what, job_id] - when for job_id, when in submitted.items() if (what, job_id) in first)
        for what in ("configure", "generate")
    }


def counts(notes: Iterable[Note], start: float, end: float) -> dict[str, int]:
    """How often each thing happened."""
    found: dict[str, int] = defaultdict(int)
    for what, _, _, when in notes:
        if start <= when <= end:
            found[what] += 1
    return dict(found)


def table(result: Mapping[str, Any]) -> str:
    """Formats the figures as a table."""
    load, redis = result["load"], result["redis"]
    lines = [
        f"{load['replicas']} replicas ({result['servers']} servers), {load['jobs']} jobs, {result['seconds']:.0f} s; "
        f"load average {result['load_average']:.1f}"
    ]
    for name, row in result["latency"].items():
        if row["n"]:
            p50, p99, most = (1000 * row[key] for key in ("p50", "p99", "max"))
            lines.append(f"{name:<22} p50 {p50:>9.1f} ms   p99 {p99:>9.1f} ms   max {most:>9.1f} ms   n {row['n']}")
    for name, row in result["processes"].items():
        lines.append(
            f"{name:<22} {row['cpu']:>6.3f} CPUs   {row['rss_mb']:>7.1f} MB   {row['descriptors']:>6} fds   "
            f"{row['threads']:>4} threads"
        )
    lines.append(
        f"Redis {redis['ops_per_s']:.0f} commands/s, {redis['mb_in_per_s']:.2f} MB/s in, "
        f"{redis['mb_out_per_s']:.2f} MB/s out, {redis['memory_mb']:.0f} MB, {redis['clients']} clients"
    )
    lines += _commands(redis["commands_per_s"])
    lines.append(
        f"samples {result['samples_per_s']:.1f}/s, steps {result['steps_per_s']:.2f}/s, status calls "
        f"{result['status_calls_per_s']:.1f}/s, refused {result['refused']}"
    )
    return "\n".join(lines)


def _commands(rates: Mapping[str, float]) -> Sequence[str]:
    return [f"  {name:<20} {rate:>8.1f}/s" for name, rate in rates.items() if rate >= 1]
