"""Files that a job's rewards run: another one in mid-run would change what the job learns, so the job pauses."""

import json
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path

from flowfleet.job.fingerprints import CHANGED, OF_A_FILE
from services.controller.rewards.answers import Answer


class RewardFiles:
    """Compares the files of a job's rewards with the versions that `known` stored (`store/rewards.py`). `reloaded` is a
    stack's list of versions that its user accepted (flowfleet/local/stack.py)."""

    def __init__(self, known: Callable[..., Awaitable[str]], reloaded: Path) -> None:
        self._known, self._reloaded = known, reloaded

    async def changed(self, name: str, service: str, answers: Iterable[Answer]) -> str:
        """Reason to pause for another file; "" without one."""
        answers = list(answers)
        versions = {answer.version.rpartition(" ")[2] for answer in answers}
        for found in sorted(version for version in versions if version.startswith(OF_A_FILE)):
            is_accepted = self._accepted(service) in ("", found)
            known = await self._known(service, found, accept=is_accepted)
            if known != found:
                return _reason(name, service, f"its file {CHANGED} ({known}, now {found})")
        problem = next((answer.problem for answer in answers if CHANGED in answer.problem), "")
        return problem and _reason(name, service, problem)

    def _accepted(self, service: str) -> str | None:
        with suppress(OSError, ValueError, AttributeError):
            accepted: str | None = json.loads(self._reloaded.read_text()).get(service)
            return accepted
        return None


def _reason(name: str, service: str, cause: str) -> str:
    return (
        f"rewards.{name}: {cause}: put the former file back, or accept this one with `flowfleet rewards reload "
        f"{service}` (in a cluster: `flowfleet rewards set ID {name} --open-steps`), then resume the job"
    )
