"""Error that says what a job must change to run."""

from collections.abc import Sequence

from flowfleet.errors import InvalidRequest


class InvalidJob(InvalidRequest):
    """A job that cannot run; one message a setting, each starting with its name. `what` says so of more than a job."""

    def __init__(self, problems: Sequence[str], what: str = "the job cannot run") -> None:
        super().__init__("\n".join(problems))
        self.problems, self.what = problems, what
