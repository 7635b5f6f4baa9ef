"""`python -m flowfleet.cli` is the `flowfleet` command."""

from flowfleet.cli.main import app

app()
