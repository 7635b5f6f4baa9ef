"""`flowfleet profile`: where the time of training steps goes."""

import time
from typing import Annotated

import typer

from flowfleet.api.profiles import Profile
from flowfleet.cli.options import Ca, JobId, Json, Url, out, tell
from flowfleet.client import Client

_POLL_S = 1.0


def profile(
    job_id: JobId,
    steps: Annotated[int, typer.Option(min=1, max=10, help="Training steps, from the next.")] = 1,
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Profile the next updates of a job's trainer and the sampling for them, and show their ten largest costs."""
    with Client(url, ca=ca) as client:
        job = client.find(job_id)
        before = {(found.step, found.of) for found in client.profiles(job.id)}
        client.profile(job.id, steps)
        while True:
            ended = client.job(job.id).ended
            found = [one for one in client.profiles(job.id) if (one.step, one.of) not in before]
            if ended or sum(one.of == "trainer" for one in found) >= steps:
                break
            time.sleep(_POLL_S)
    tell(found, json_, lambda: _show(job.id, found))


def _show(job_id: str, found: list[Profile]) -> None:
    for one in found:
        where = "kernels" if one.on_device else "operators"
        whose = "rank 0's" if one.of == "trainer" else "a rollout's"
        out.print(f"Step {one.step}: {whose} {where} that took the most time by themselves", highlight=False)
        for cost in one.costs:
            line = f"{cost.seconds:10.4f} s {cost.calls:8} ×  {cost.name}"
            out.print(line, highlight=False, markup=False, soft_wrap=True)
    names = [name for one in found for name in one.files]
    out.print(f"Traces for ui.perfetto.dev: GET /v1/jobs/{job_id}/profiles/NAME", highlight=False, soft_wrap=True)
    for name in names:
        out.print(f"  {name}", highlight=False, markup=False, soft_wrap=True)
    if not found:
        out.print("The job ended without another training step.")
