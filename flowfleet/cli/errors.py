"""Turns what a user can do wrong on the command line into one readable message and exit code 1."""

import os
import sys
from typing import Any, Final

import typer
import typer.core
from pydantic import ValidationError
from rich.text import Text

from flowfleet.api.problems import ApiError
from flowfleet.cli.options import err
from flowfleet.extras import pip_install
from flowfleet.filesystem import check_names
from flowfleet.local.stack import StackError

EXTRAS: Final = {
    "archived": "service",
    "export": "trainer",
    "plan": "trainer",
    "push": "hub",
    "redis-acl": "service",
    "check-reward": "media",
    "check-model": "trainer",
    "samples": "service",
    "try-reward": "reward",
}
"""Command to the extra that it needs beyond the base install. Commands that start processes need `local`."""

REMOVED: Final = {
    "chaos": "run `pytest tests/e2e/test_chaos.py` in a clone (CONTRIBUTING.md, Inject faults)",
}
"""Command of the last release to what replaces it."""


class Group(typer.core.TyperGroup):
    """Prints an error in place of a traceback, and names the extra where a package is missing."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in REMOVED:
            raise ValueError(f"`flowfleet {args[0]}` was removed: {REMOVED[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            check_names([*sys.argv[1:], os.getcwd()])
            return super().invoke(ctx)
        except ValidationError as error:
            message = "\n".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("", "flowfleet", "services"):
                raise
            command, needs = ctx.invoked_subcommand, f"needs the module {error.name}, which is not installed"
            message = f"`flowfleet {command}` {needs}: {pip_install(EXTRAS.get(command, 'local'))}"
        except (ApiError, StackError, ValueError, OSError) as error:
            message = str(error)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        err.print(Text.assemble(("error:", "red"), f" {message}"), soft_wrap=True)
        raise typer.Exit(1)
