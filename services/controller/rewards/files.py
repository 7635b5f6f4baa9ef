"""Files that a job's rewards run: another one in mid-run would change what the job learns, so the job pauses."""

import json
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from flowfleet.job.fingerprints import CHANGED, OF_A_FILE
from services.controller.rewards.answers import Answer


async def changed_file(
    known: Callable[..., Awaitable[str]], reloaded: Path, name: str, service: str, answers: Collection[Answer]
) -> str:
    """Reason to pause for another file than the `known` one (store/rewards.py); "" without one. `reloaded`: a stack's
    list of those that its user accepted (flowfleet/local/stack.py)."""
    problem = next((answer.problem for answer in answers if CHANGED in answer.problem), "")
    versions = {answer.version.rpartition(" ")[2] for answer in answers}
    for found in sorted(version for version in versions if version.startswith(OF_A_FILE)):
        before = await known(service, found, accept=_accepted(reloaded, service) in ("", found))
        problem = problem if before == found else f"its file {CHANGED} ({before}, now {found})"
    return problem and (
        f"rewards.{name}: {problem}: put the former file back, or accept this one with `flowfleet rewards reload "
        f"{service}` (in a cluster: `flowfleet rewards set ID {name} --open-steps`), then resume the job"
    )


def _accepted(reloaded: Path, service: str) -> str | None:
    return json.loads(reloaded.read_text()).get(service) if reloaded.is_file() else None
