"""`flowfleet check-reward`: does a reward service keep its contract? Needs its address, no controller and no job."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flowfleet.cli.options import Json, tell
from flowfleet.cli.terminal import Terminal

if TYPE_CHECKING:
    from flowfleet.conformance import Result

Pairs = list[str] | None


def check_reward(
    address: Annotated[str, typer.Argument(help="grpc://HOST:PORT, grpcs://HOST:PORT with TLS.")],
    prompt: Annotated[
        str | None, typer.Option(help='Prompt of the samples; default: a sign that says "FLOW" …')
    ] = None,
    metadata: Annotated[Pairs, typer.Option(help="KEY=VALUE of the samples; repeatable.")] = None,
    param: Annotated[Pairs, typer.Option(help="KEY=VALUE of each call, as `params` of a job; repeatable.")] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="Picture or MP4 to send instead of the drawn ones; repeatable.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Limit on each call, in seconds.")] = 60.0,
    allowed: Annotated[
        float,
        typer.Option(min=0.1, help="Limit on a call after cancelled ones, in seconds; give more on a busy machine."),
    ] = 2.0,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Maximum difference between scores of one sample.")] = 1e-3,
    max_batch: Annotated[int, typer.Option(min=1, help="Size of the largest batch to send.")] = 1024,
    ca: Annotated[
        Path | None, typer.Option(help="PEM file of the CA of a grpcs address; default: the one in FLOWFLEET_TLS_DIR.")
    ] = None,
    cert: Annotated[Path | None, typer.Option(help="PEM file of the client's certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None,
    json_: Json = False,
) -> None:
    """Check that a reward service keeps its contract; exits with 1 if it breaks it."""
    from flowfleet import conformance

    drawn = conformance.Options()
    options = conformance.Options(
        prompt=drawn.prompt if prompt is None else prompt,
        metadata=pairs("--metadata", metadata or ()),
        params=pairs("--param", param or ()),
        images=tuple(image or ()),
        timeout_s=timeout,
        allowed_s=allowed,
        tolerance=tolerance,
        max_batch=max_batch,
        ca=ca,
        cert=cert,
        key=key,
    )
    progress = Terminal(stderr=True)
    with progress.status("connecting") as status:

        def asked(result: Result) -> None:
            status.update(f"{result.name}: {result.status}")

        report = conformance.run(address, options, asked)
    tell(report, json_, lambda: report.render(Terminal(width=None if Console().is_terminal else 120)))
    if not report.ok:
        raise typer.Exit(1)


def pairs(flag: str, texts: Iterable[str]) -> dict[str, str]:
    """Parses KEY=VALUE pairs. Raises ValueError for other text."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"{flag} {text!r}: give KEY=VALUE")
        pairs[name] = value
    return pairs
