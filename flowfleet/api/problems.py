"""Errors of the REST API: application/problem+json, and the exception that the client raises."""

from flowfleet.api.answers import Answer


class SettingProblem(Answer):
    setting: str
    """Dotted name in the request."""
    detail: str
    """Says what is wrong and what to change."""


class Problem(Answer):
    """RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str
    errors: list[SettingProblem] | None = None


class ApiError(Exception):
    """The API refused a request (application/problem+json), or could not be reached (`status` 0)."""

    def __init__(self, status: int, detail: str, problems: tuple[SettingProblem, ...] = ()) -> None:
        super().__init__("\n".join([detail, *(f"  {problem.detail}" for problem in problems)]))
        self.status = status
        self.detail = detail
        self.problems = problems
