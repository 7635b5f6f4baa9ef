"""Report of a run of the suite: one result per check."""

from enum import StrEnum

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text


class Status(StrEnum):
    """Status of a check."""

    PASS = "pass"
    """The service does what the contract requires."""
    NOTE = "note"
    """Allowed, and worth knowing."""
    SKIP = "skip"
    """Not run, with the reason."""
    FAIL = "fail"
    """The contract is broken."""


_COLORS = {Status.PASS: "green", Status.NOTE: "yellow", Status.SKIP: "bright_black", Status.FAIL: "red"}
_PLURAL = {Status.PASS: "passed", Status.NOTE: "noted", Status.SKIP: "skipped", Status.FAIL: "failed"}


class Result(BaseModel):
    """Result of one check."""

    name: str
    rule: str
    """Requirement of the contract."""
    status: Status
    detail: str = ""
    """Observation, or the reason for not asking."""
    seconds: float


class Service(BaseModel):
    """Answer of Describe."""

    name: str
    version: str
    contract: int
    modalities: list[str]
    score_min: float
    score_max: float
    max_batch_size: int
    needs_group: bool
    components: list[str]


class Report(BaseModel):
    """Report on one service."""

    address: str
    service: Service | None = None
    """None where Describe gave no answer."""
    results: list[Result]
    seconds: float

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [result.name for result in self.results if result.status is Status.FAIL]

    @property
    def ok(self) -> bool:
        """No check failed."""
        return not self.failed

    def result(self, name: str) -> Result:
        """Result of the check with this name. Raises KeyError if there is none."""
        return {result.name: result for result in self.results}[name]

    def render(self, console: Console) -> None:
        """Prints a table, and a last line that counts."""
        console.print(self._heading(), highlight=False)
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
        table.add_column("")
        table.add_column("CHECK", no_wrap=True)
        table.add_column("WHAT WAS SEEN", ratio=1, overflow="fold")
        for result in self.results:
            shown = result.detail if result.status is not Status.FAIL else f"{result.detail}\nrequired: {result.rule}"
            table.add_row(Text(result.status, style=_COLORS[result.status]), result.name, Text(shown))
        console.print(table)
        console.print(self._summary(), highlight=False)

    def text(self, width: int = 120) -> str:
        """The same as plain text."""
        console = Console(width=width, color_system=None, force_terminal=False)
        with console.capture() as capture:
            self.render(console)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def _heading(self) -> str:
        if self.service is None:
            return f"{self.address}\n"
        about = self.service
        limit = f"at most {about.max_batch_size} a call" if about.max_batch_size else "calls of any size"
        groups = ", whole groups" if about.needs_group else ""
        return (
            f"{self.address}: {about.name} {about.version}, {' and '.join(about.modalities)}, scores "
            f"{about.score_min:g} to {about.score_max:g}, {limit}{groups}, contract {about.contract}\n"
        )

    def _summary(self) -> str:
        counts = {status: sum(result.status is status for result in self.results) for status in Status}
        said = ", ".join(f"{count} {_PLURAL[status]}" for status, count in counts.items() if count)
        return f"\n{said}, in {self.seconds:.1f} s"
