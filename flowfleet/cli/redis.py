"""`flowfleet redis-acl`: the commands that give an existing Redis a user for each kind of service."""

from pathlib import Path
from typing import Annotated

import typer

from flowfleet.cli.options import Json, tell
from flowfleet.text_files import read_text


def redis_acl(
    passwords: Annotated[Path, typer.Argument(help="Folder with one password per kind; missing ones are created.")],
    redis6: Annotated[bool, typer.Option("--redis6", help="For servers older than Redis 7.")] = False,
    json_: Json = False,
) -> None:
    """Print redis-cli commands that create the users of controllers, rollouts and trainers; calls no server."""
    from flowfleet.local.files import make_private, write_atomically
    from flowfleet.redis import acl
    from flowfleet.redis.server import new_password

    make_private(passwords)
    for kind in acl.RULES:
        if not (passwords / kind).exists():
            write_atomically(passwords / kind, new_password())
    words = {kind: read_text(passwords / kind).strip() for kind in acl.RULES}
    if empty := [kind for kind, word in words.items() if not word]:
        raise ValueError(f"{passwords / empty[0]} is empty: write a password into it, or remove it to have one made")
    lines = acl.setuser_lines(words, selectors=not redis6)
    tell(lines.splitlines(), json_, lambda: typer.echo(lines, nl=False))
