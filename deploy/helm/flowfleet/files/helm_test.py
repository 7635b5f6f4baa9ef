"""Checks a release for `helm test`, through its Service and with its API key. Exit code 0: every check passed."""

import json
import os
import sys
import time
from pathlib import Path

from flowfleet.client import ApiError, Client
from flowfleet.job.files import prepare_job


def main() -> None:
    deadline = time.monotonic() + float(os.environ["TIMEOUT_S"])
    rewards = set(json.loads(os.environ["REWARDS"]))
    with Client() as client:
        expect("a controller answers, and knows the API key", client.version())
        missing = rewards - set(client.fleet().rewards)
        expect("the rewards of the release are known", not missing, f"not {', '.join(sorted(missing))}")
        expect("a job that cannot work is refused with 422", refusal(client) == 422)
        with Client(api_key="no-key-of-this-release") as stranger:
            expect("a wrong API key is refused with 401", refusal(stranger) == 401)
        if os.environ["JOB"]:
            run(client, deadline)


def run(client: Client, deadline: float) -> None:
    job = client.submit(prepare_job(Path(os.environ["JOB"]), json.loads(os.environ["SET"]), same_machine=False))
    print(f"job {job.id} is submitted")
    status = ""
    while not job.ended:
        job = client.job(job.id)
        line = f"{job.status} {job.progress.phase} {job.reason}"
        if line != status:
            print(line)
            status = line
        if time.monotonic() > deadline:
            client.cancel(job.id)
            sys.exit(f"FAILED: the job is still {job.status} after test.timeoutSeconds")
        time.sleep(1.0)
    expect("the job succeeds", job.status == "succeeded", f"{job.status}: {job.reason}")
    trained = job.progress.samples_trained
    expect("samples were trained on", trained > 0, f"{trained} of them")


def refusal(client: Client) -> int:
    """The status with which an empty job is refused; 0 where it is accepted."""
    try:
        client.submit({})
    except ApiError as error:
        return error.status
    return 0


def expect(what: str, found: object, otherwise: str = "") -> None:
    if not found:
        sys.exit(f"FAILED: {what}: {otherwise or found}")
    print(f"ok: {what}", flush=True)


main()
