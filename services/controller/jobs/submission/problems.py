"""Error that says what a job must change to run."""

from collections.abc import Sequence

from flowfleet.errors import InvalidRequest


class InvalidJob(InvalidRequest):
    """A job that cannot run; one message a setting, each starting with its name."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
